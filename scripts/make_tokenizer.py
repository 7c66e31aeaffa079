#!/usr/bin/env python3
"""Makes the tokenizer of the emulated engines: a small byte-level BPE.

    python scripts/make_tokenizer.py [PATH]

PATH defaults to python/lmetric_lab/emulated/tokenizer.json. The training texts are `WORDS` and
`PHRASES`.

Deterministic: the same script writes the same bytes. Any UTF-8 text can be tokenized (all 256 bytes
are tokens). Every word of `WORDS` behind a space is one token in any context, since the
pre-tokenizer cuts in front of that space. So text made of such words tokenizes back to its original
ids.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 4096  # an upper bound: training stops when every word is one token
DEFAULT_PATH = Path(__file__).parent.parent / "python/lmetric_lab/emulated/tokenizer.json"

_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
one you were her all she there would their we him been has when who will more no if out so said what up its
about into than them can only other new some could time these two may then do first any my now such like our
over man me even most made after also did many before must through back years where much your way well down
should because each just those people how too little state good very make world still own see men work long
get here between both life being under never day same another know while last might us great old year off come
since against go came right used take three states himself few house use during without again place around
however home small found thought went say part once general high upon school every does got united left number
course war until always away something fact though water less public put think almost hand enough far took
head yet government system better set told nothing night end why called eyes find going look asked later knew
point next program city business give group toward young days let room word need side white present several
order possible rather second face among form important often things looked early case large become big four
within felt children along saw best church ever least power development light thing seemed family interest
want members mind country area others done turned although open god service certain kind problem began
different door thus help sense means whole matter human idea money plan carry letter table paper river road
street field forest mountain island ocean summer winter spring autumn morning evening garden window kitchen
bridge tower castle village harbor market engine machine signal network router request response server client
cluster model token batch prefix cache block memory queue worker scheduler balance latency throughput capacity
budget trace replay policy score weight measure compare result figure example answer question reason method
theory science history nature music picture story language reader writer teacher student doctor lawyer farmer
driver sailor soldier captain friend brother sister mother father daughter husband wife child baby animal
horse bird fish tree flower grass stone iron gold silver copper glass wood cotton wool leather bread butter
cheese sugar salt pepper coffee dinner lunch breakfast supper apple orange lemon cherry red blue green yellow
brown black gray purple dark bright warm cold hot cool dry wet soft hard heavy simple clear quick slow strong
weak deep wide narrow thick thin round square flat sharp smooth rough clean empty full ready careful gentle
honest quiet loud brave calm eager proud rich poor fair free busy lucky happy sad angry tired hungry begin
break bring build burn buy catch choose climb close count cover cross cut dance dig draw dream dress drink
drive drop eat enter explain fall fear feed feel fight fill finish fix float fly follow forget forgive gather
grow guess hang hear hide hit hold hope hunt hurry hurt join jump keep kick kill kiss knock laugh lead lean
learn leave lend lie lift listen live lose love marry meet mix move notice offer paint pass pay pick play
please pour pray press pull push quit rain raise reach read receive refuse remain remember repair repeat reply
rest return ride ring rise roll rub run sail save search seek seem sell send serve sew shake share shine shoot
shout show shut sing sink sit sleep slide smell smile speak spell spend spread stand start stay steal stick
stop strike study suggest swim swing talk taste teach tear tell throw touch train travel try turn understand
visit wait wake walk warn wash watch wear win wish wonder worry write north south east west center corner
middle bottom top front inside outside above below behind beside beyond near hour minute moment month week
century today tomorrow yesterday five six seven eight nine ten eleven twelve twenty hundred thousand million
half quarter double single total average maximum minimum zero please thank sorry yes okay summary document
section chapter paragraph sentence title author source version update change error warning message system user
assistant content function return value string integer object array list index key default option field
explain describe translate summarize rewrite consider suppose assume therefore instead perhaps maybe certainly
likely usually sometimes already together apart forward backward upward inward soon late early ago twice maybe
quite really
"""
WORDS = _WORDS.split()

PHRASES = [
    "It's what they're saying, isn't it? I'll go; we've been there, and he'd know. I'm sure you don't.",
    '{"role": "user", "content": "text", "id": 123, "items": [1, 2, 3], "ok": true, "none": null}',
    "def main(self, x, y):\n    for i in range(10):\n        if x == y:\n            return i\n",
    "https://www.example.com/path?query=1&page=2 (see [1], [2]) -- 50% of $1,000.00 #tag @user_name\n\n",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 20 24 30 50 60 64 100 128 256 512 1000 1024 2024 2025 2026",
    "# Title\n\n- item one\n- item two\n\n1. First\n2. Second\n\n```python\ncode\n```\n| a | b |\n| --- |\n",
    "user\nassistant\nsystem\n",
]


def corpus() -> list[str]:
    """Returns the training texts.

    Each word occurs in lower case behind a space, with a capital, and at the start of a line. The
    phrases follow.
    """
    lines = []
    for rank, word in enumerate(dict.fromkeys(WORDS)):
        times = 4 + 400 // (rank + 4)
        lines += [f" {word}"] * (4 * times) + [word] * times + [f" {word.capitalize()}", word.capitalize()]
    return lines + PHRASES * 3


def build() -> Tokenizer:
    """Trains the tokenizer."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=3,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    for word in WORDS:
        if len(tokenizer.encode(f" {word}").ids) != 1:
            raise SystemExit(f"the word {word!r} is more than one token: raise VOCABULARY")
    return tokenizer


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_PATH
    path.write_text(build().to_str(pretty=False) + "\n", encoding="utf-8")
    print(f"{path}: {build().get_vocab_size()} tokens")
