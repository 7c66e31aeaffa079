//! Responses, head and body: any cuts give the same result, framed correctly for every client.
#![no_main]
use libfuzzer_sys::fuzz_target;
use lmetric_fuzz::play;

fuzz_target!(|data: &[u8]| {
    let [flags, size, response @ ..] = data else { return };
    let (http11, require_finish) = (flags & 1 == 0, flags & 2 == 0);
    let whole = play(response, response.len(), http11, require_finish);
    for size in [1, usize::from(*size)] {
        let cut = play(response, size, http11, require_finish);
        // In pieces, the response may end before the malformed byte that spoils it as a whole.
        if let Some(whole) = &whole {
            assert_eq!(Some(whole), cut.as_ref(), "in pieces of {size}");
        }
    }
});
