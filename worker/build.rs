//! Lets this package's programs and tests find MLX's library where scripts/setup-mlx put it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DEP_MLX_LIBDIR");
    // Set by the generated table in mlx-linux.toml, and by nothing else: not on a Mac, and not
    // without the feature.
    if let Ok(folder) = std::env::var("DEP_MLX_LIBDIR") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{folder}");
    }
}
