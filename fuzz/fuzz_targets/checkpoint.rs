#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ork_fuzz::fuzzing::checkpoint::check(bytes));
