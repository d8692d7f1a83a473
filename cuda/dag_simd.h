// dag_simd.h -- vectors as wide as the processor's, in plain GNU C++, and an exponential that
//               cannot overflow.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "dag_graph.h"

namespace dag {

// Vectors wider than a register would compile, too, but GCC permutes them number by number: with
// AVX2, 64 bytes took five times as long as 32.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class Real>
struct Simd;

template <>
struct Simd<float> {
  typedef float Vec __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Bits;
  typedef Bits Int __attribute__((vector_size(kVectorBytes)));
  static constexpr int T = kVectorBytes / 4;
  static constexpr int mantissa_bits = 23, bias = 127, degree = 7, head = 32;
  static constexpr float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
};

template <>
struct Simd<double> {
  typedef double Vec __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Bits;
  typedef Bits Int __attribute__((vector_size(kVectorBytes)));
  static constexpr int T = kVectorBytes / 8;
  static constexpr int mantissa_bits = 52, bias = 1023, degree = 13, head = 256;
  static constexpr double round = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
};

template <class Real>
using Vec = typename Simd<Real>::Vec;

template <class Real>
inline Vec<Real> load(const Real* from) {
  Vec<Real> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class Real>
inline void store(Real* to, Vec<Real> v) {
  std::memcpy(to, &v, sizeof v);
}

template <class Real>
using Int = typename Simd<Real>::Int;

// A vector in memory, in one line of the cache: loads that cross two take twice as long.
template <class Real>
struct alignas(kVectorBytes) Lanes {
  Real at[Simd<Real>::T];
};

// 0, 1, 2, ...
template <class Real>
inline Int<Real> lanes() {
  Int<Real> out;
  for (int q = 0; q < Simd<Real>::T; ++q) out[q] = q;
  return out;
}

template <class Real>
inline Vec<Real> turned_around(Vec<Real> v) {
  return __builtin_shuffle(v, Simd<Real>::T - 1 - lanes<Real>());
}

// A T x T block: entry (r, q) goes to (T - 1 - q, T - 1 - r).
template <class Real>
inline void turn_about_antidiagonal(const Lanes<Real>* block, Lanes<Real>* turned) {
  constexpr int T = Simd<Real>::T;
  Vec<Real> row[T];
  for (int r = 0; r < T; ++r) row[r] = turned_around<Real>(load(block[T - 1 - r].at));
  for (int apart = 1; apart < T; apart *= 2) {  // transpose: blocks of 1, 2, 4, ... change places
    const Int<Real> q = lanes<Real>(), step = ((q & apart) != 0) & (T - apart);
    for (int r = 0; r < T; ++r) {
      if (r & apart) continue;
      const Vec<Real> above = row[r], below = row[r + apart];
      row[r] = __builtin_shuffle(above, below, q + step);
      row[r + apart] = __builtin_shuffle(above, below, q + step + apart);
    }
  }
  for (int r = 0; r < T; ++r) store<Real>(turned[r].at, row[r]);
}

// What compares false, NaN above all, is passed over if it is not everywhere.
template <class Real>
inline Real largest(Vec<Real> v) {
  for (int apart = Simd<Real>::T / 2; apart > 0; apart /= 2) {
    const Vec<Real> other = __builtin_shuffle(v, lanes<Real>() ^ apart);
    v = other > v ? other : v;
  }
  return v[0];
}

template <class Real>
inline bool any(Int<Real> is_true) {
  typename Simd<Real>::Bits found = 0;
  for (int q = 0; q < Simd<Real>::T; ++q) found |= is_true[q];
  return found != 0;
}

// num numbers, -inf in the other lanes. Nothing beyond them is read.
template <class Real>
inline Vec<Real> load_some(const Real* from, int num) {
  if (num == Simd<Real>::T) return load(from);  // not worth a call of memcpy
  Vec<Real> v = Vec<Real>{} - Real(INFINITY);
  std::memcpy(&v, from, num * sizeof(Real));
  return v;
}

// The first num lanes.
template <class Real>
inline void store_some(Real* to, int num, Vec<Real> v) {
  if (num == Simd<Real>::T) return store(to, v);
  std::memcpy(to, &v, num * sizeof(Real));
}

// The exponent that brings e^x below 2^head: e^x * 2^-shift < 0.75 * 2^head. Mantissas and factors
// stand that high above 1, so that far more than 2^-126 of them is still a normal number.
template <class Real>
inline int shift_of(double x) {
  return int(__builtin_nearbyint(x * kLog2e)) + 1 - Simd<Real>::head;
}

// 2^e, and 0 where that is no normal number. e is at most 127.
template <class Real>
inline Real power_of_two(int e) {
  using S = Simd<Real>;
  if (e < Range<Real>::smallest) return 0;
  const auto bits = typename S::Bits(e + S::bias) << S::mantissa_bits;
  Real out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// v * 2^e for any e <= 127, also where 2^e itself is no normal number.
template <class Real>
inline Vec<Real> scaled(Vec<Real> v, int e) {
  const int least = Range<Real>::smallest;
  if (e >= least) return v * power_of_two<Real>(e);
  return v * power_of_two<Real>(least) * power_of_two<Real>(e - least);
}

// The exponent e with 0.5 <= x / 2^e < 1, of the largest x >= 0, a normal number.
template <class Real>
inline int exponent_of_largest(Vec<Real> v) {
  using S = Simd<Real>;
  Int<Real> bits;
  std::memcpy(&bits, &v, sizeof bits);
  for (int apart = S::T / 2; apart > 0; apart /= 2) {
    const Int<Real> other = __builtin_shuffle(bits, lanes<Real>() ^ apart);
    bits = other > bits ? other : bits;
  }
  return int(bits[0] >> S::mantissa_bits) - S::bias + 1;
}

constexpr double factorial(int d) { return d < 2 ? 1 : d * factorial(d - 1); }

// e^x * 2^-shift, 0 where that is below the smallest normal number; relative error about 1e-7 or
// 2e-16. The shift goes into the exponent bits, so the scores are never moved and lose no digits.
template <class Real>
inline Vec<Real> exp_shifted(Vec<Real> x, int shift) {
  using S = Simd<Real>;
  const Vec<Real> low = Vec<Real>{} - Real(1.5 * kLimit);
  x = x > low ? x : low;
  const Vec<Real> k = (x * Real(kLog2e) + S::round) - S::round;
  const Vec<Real> r = (x - k * S::ln2_high) - k * S::ln2_low;
  Vec<Real> p = Vec<Real>{} + Real(1.0 / factorial(S::degree));
  for (int d = S::degree - 1; d >= 0; --d) p = p * r + Real(1.0 / factorial(d));  // |r| < 0.35
  const typename S::Int e = __builtin_convertvector(k, typename S::Int) - shift;
  const typename S::Int bits = (e + S::bias) << S::mantissa_bits;
  Vec<Real> scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return e < Range<Real>::smallest ? Vec<Real>{} : p * scale;
}

}  // namespace dag
