//! Responses, head and body: any cuts give the same result, framed correctly for every client.
#![no_main]
use libfuzzer_sys::fuzz_target;
use lmetric_fuzz::play_begun;
use lmetric_wire::Scanner;

fuzz_target!(|data: &[u8]| {
    let [flags, size, response @ ..] = data else { return };
    let play = |size| {
        let mut scanner = Scanner::default();
        scanner.begin(flags & 1 == 0, flags & 2 == 0, false);
        if flags & 4 != 0 {
            scanner.rename("m", "another name");
        }
        play_begun(scanner, response, size)
    };
    let whole = play(response.len());
    for size in [1, usize::from(*size)] {
        let cut = play(size);
        // In pieces, the response may end before the malformed byte that spoils it as a whole.
        if let Some(whole) = &whole {
            assert_eq!(Some(whole), cut.as_ref(), "in pieces of {size}");
        }
    }
});
