//! Writes the Rust bindings of mlx-c, by the configuration that mlx-sys ships in its own sources.

mod bindgen_config {
    include!(concat!(env!("MLX_SYS_SOURCE"), "/src/bindgen_config.rs"));
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = std::path::PathBuf::from(concat!(env!("MLX_SYS_SOURCE"), "/src/mlx-c"));
    let out = std::env::args().nth(1).ok_or("usage: mlx-bindings OUT.rs")?;
    let headers = bindgen_config::discover_headers(&root)?;
    bindgen_config::builder(&root, &headers).generate()?.write_to_file(out)?;
    Ok(())
}
