"""Names that no DNS server answers: they delay nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# As root of a user namespace: a network with loopback alone, and mounts that nobody else sees.
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "--net")
RUN = Path(__file__).with_name("silent_names.py")


def can_unshare() -> bool:
    try:
        mounts = subprocess.run([*NAMESPACE, "ip", "link", "set", "lo", "up"], capture_output=True)
    except FileNotFoundError:
        return False
    return mounts.returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="needs unshare, ip and user namespaces")
def test_names_without_an_answer_take_no_other_name_out_of_service() -> None:
    run = [*NAMESPACE, sys.executable, RUN]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["statuses"] == [200] * 8
    near = said["errors"].pop("near")
    assert near is None
    assert set(said["errors"].values()) == {"DNS: no answer within 1 s"}
