/* What mlx-c and mlx-rs take for granted on a Mac, for g++ and libclang on Linux x86-64.
 * Force-included, with HAS_FLOAT16 and HAS_BFLOAT16 defined, while mlx-c is compiled and while
 * its headers are read for the bindings. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus

#include <time.h>
#include <mlx/types/half_types.h>

/* mlx-rs calls the half-precision accessors, which mlx-c declares on Arm only. */
using float16_t = mlx::core::float16_t;
using bfloat16_t = mlx::core::bfloat16_t;

/* mlx-rs seeds its random numbers from this clock, which only Darwin has. */
extern "C" __attribute__((used)) inline uint64_t mach_approximate_time(void) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return uint64_t(now.tv_sec) * 1000000000u + uint64_t(now.tv_nsec);
}

/* libstdc++ before 13 has no <format>; mlx-c uses plain "{}" alone. */
#if __has_include(<format>)
#include <format>
#else
#include <sstream>
#include <string>
#include <string_view>
namespace std {
template <class... Values>
inline string format(string_view pattern, const Values&... values) {
  ostringstream out;
  auto put = [&](const auto& value) {
    auto hole = pattern.find("{}");
    out << pattern.substr(0, hole);
    if (hole == string_view::npos) {
      pattern = {};
      return;
    }
    out << value;
    pattern.remove_prefix(hole + 2);
  };
  (put(values), ...);
  out << pattern;
  return out.str();
}
} // namespace std
#endif

#else

/* The Rust types that bindgen gives these two on Arm: a newtype over u16, and u16. */
typedef __fp16 float16_t;
typedef uint16_t bfloat16_t;

#endif
