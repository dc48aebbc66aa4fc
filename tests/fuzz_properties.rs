//! The fuzzing properties on a fixed set of cases; `fuzz/` runs the same ones for as long as wanted.

mod fuzzing;

/// Calls `check` with `cases` inputs of up to `len` bytes; a failure prints the seed.
fn cases(cases: u64, len: usize, check: fn(&[u8])) {
    for seed in 0..cases {
        // SplitMix64: neighbouring seeds give unrelated bytes.
        let mut state = seed.wrapping_mul(0x2545_f491_4f6c_dd1d);
        let bytes: Vec<u8> = (0..len)
            .map(|_| {
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                (z >> 56) as u8
            })
            .collect();
        let run = std::panic::catch_unwind(|| check(&bytes));
        assert!(run.is_ok(), "seed {seed} breaks the property");
    }
}

#[test]
fn an_honest_pack_holds_the_invariants() {
    fuzzing::pack::check(&[]);
}

#[test]
fn forged_packs_are_refused_or_run() {
    cases(400, 128, fuzzing::pack::check);
}

#[test]
fn relocation_touches_address_words_only() {
    cases(2000, 1200, fuzzing::streams::relocate);
}

#[test]
fn clean_programs_run() {
    cases(1500, 64, fuzzing::streams::lint_then_run);
}

#[test]
fn arbitrary_words_never_panic() {
    cases(2000, 900, fuzzing::streams::arbitrary_words);
}

#[test]
fn mutated_checkpoints_are_refused_in_one_line() {
    cases(2000, 96, fuzzing::checkpoint::check);
}

/// Found by libFuzzer: a string of the golden section promised more bytes than the file has.
#[test]
fn strings_allocate_what_their_section_justifies() {
    // The first byte chooses the pack.
    fuzzing::pack::check(b"\0\x80\xff\xff\xff\xfftensors");
}

/// Found by libFuzzer: a forged factor makes the logits infinite, which is one clear error.
#[test]
fn infinite_logits_are_an_error() {
    fuzzing::pack::check(
        b"\0\xe5\x6c\x06\0\0\x06ie\0n\0ine\x0ab\x0a\x0a\xe8\xe8\xe8\xe8\xe8\xe8\xe8\xe8\xe8\xe8\xe8\xe8\xe8b\0:\0 [[\x8a\xe1\xb0",
    );
}
