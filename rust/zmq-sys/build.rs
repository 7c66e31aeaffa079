//! Builds libzmq from the sources in `zeromq-src`, without CURVE: engines publish their events without encryption.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    zeromq_src::Build::new().with_libsodium(None).build();
}
