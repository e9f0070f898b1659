//! Tells `podring doctor` what this binary was built for.

fn main() {
    for name in ["TARGET", "PROFILE"] {
        let value = std::env::var(name).unwrap_or_else(|_| "unknown".into());
        println!("cargo::rustc-env=PODRING_BUILD_{name}={value}");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
