# Read by every CMake build for a Mac. MLX's reader of GGUF files and ggml's both define gguf_get_key,
# and both are linked into the worker: MLX's takes another name.
if(CMAKE_SOURCE_DIR MATCHES "/mlx-c$")
  add_compile_definitions(gguf_get_key=mlx_gguf_get_key)
endif()
