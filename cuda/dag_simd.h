// dag_simd.h -- vectors of 64 bytes in plain GNU C++, for registers of any width, and an
//               exponential that cannot overflow.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dag_graph.h"

namespace dag {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
constexpr int kVectorBytes = 64, kParts = kVectorBytes / kRegisterBytes;

template <class Number>
using BitsOf = std::conditional_t<sizeof(Number) == 4, int32_t, int64_t>;

// A vector of 64 bytes on every processor, in as many registers as that takes. (GCC has vectors
// wider than a register, but keeps them in memory and permutes them element by element.)
template <class Number>
struct Vector {
  typedef Number Part __attribute__((vector_size(kRegisterBytes)));
  typedef Vector<BitsOf<Number>> Mask;  // all bits of an element are set where it is true
  static constexpr int kPerPart = kRegisterBytes / sizeof(Number);
  Part part[kParts];

  Vector(Number all = 0) {
    for (Part& p : part) p = all - Part{};  // x - 0 is x bit for bit; 0 + x is not, for x = -0
  }
  template <class F>
  static Vector of_parts(F f) {
    Vector out;
    for (int p = 0; p < kParts; ++p) out.part[p] = f(p);
    return out;
  }
  friend Vector operator+(const Vector& a, const Vector& b) {
    return of_parts([&](int p) { return a.part[p] + b.part[p]; });
  }
  friend Vector operator-(const Vector& a, const Vector& b) {
    return of_parts([&](int p) { return a.part[p] - b.part[p]; });
  }
  friend Vector operator*(const Vector& a, const Vector& b) {
    return of_parts([&](int p) { return a.part[p] * b.part[p]; });
  }
  friend Vector operator&(const Vector& a, const Vector& b) {
    return of_parts([&](int p) { return a.part[p] & b.part[p]; });
  }
  friend Mask operator<(const Vector& a, const Vector& b) {
    return Mask::of_parts([&](int p) { return a.part[p] < b.part[p]; });
  }
  friend Mask operator!=(const Vector& a, const Vector& b) {
    return Mask::of_parts([&](int p) { return a.part[p] != b.part[p]; });
  }
  Vector operator<<(int num) const {
    return of_parts([&](int p) { return part[p] << num; });
  }
  Vector& operator+=(const Vector& other) { return *this = *this + other; }
  Vector& operator|=(const Vector& other) {
    return *this = of_parts([&](int p) { return part[p] | other.part[p]; });
  }
};

template <class Real>
struct Simd;

template <>
struct Simd<float> {
  static constexpr int T = kVectorBytes / 4;
  static constexpr int mantissa_bits = 23, bias = 127, degree = 7, head = 32;
  static constexpr float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
};

template <>
struct Simd<double> {
  static constexpr int T = kVectorBytes / 8;
  static constexpr int mantissa_bits = 52, bias = 1023, degree = 13, head = 256;
  static constexpr double round = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
};

template <class Real>
using Vec = Vector<Real>;
template <class Real>
using Int = Vector<BitsOf<Real>>;

template <class Real>
inline typename Vec<Real>::Part load_part(const Real* from) {
  typename Vec<Real>::Part part;
  std::memcpy(&part, from, sizeof part);
  return part;
}

template <class Real>
inline Vec<Real> load(const Real* from) {
  return Vec<Real>::of_parts([&](int p) { return load_part(from + p * Vec<Real>::kPerPart); });
}

template <class Number>
inline void store(Number* to, const Vector<Number>& v) {
  for (int p = 0; p < kParts; ++p) {
    std::memcpy(to + p * Vector<Number>::kPerPart, &v.part[p], kRegisterBytes);
  }
}

// A vector in memory, within one cache line: a load that crosses two lines takes twice as long.
template <class Real>
struct alignas(kVectorBytes) Lanes {
  Real at[Simd<Real>::T];
};

// Chooses element by element: a where is_true, b elsewhere.
template <class Real>
inline Vec<Real> select(const Int<Real>& is_true, const Vec<Real>& a, const Vec<Real>& b) {
  return Vec<Real>::of_parts(
      [&](int p) { return is_true.part[p] ? a.part[p] : b.part[p]; });
}

template <class Real>
inline Int<Real> bits_of(const Vec<Real>& v) {
  return Int<Real>::of_parts([&](int p) { return (typename Int<Real>::Part)v.part[p]; });
}

template <class Real>
inline Vec<Real> of_bits(const Int<Real>& bits) {
  return Vec<Real>::of_parts([&](int p) { return (typename Vec<Real>::Part)bits.part[p]; });
}

// Converts to integers numbers that are whole already.
template <class Real>
inline Int<Real> integers(const Vec<Real>& v) {
  using Part = typename Int<Real>::Part;
  return Int<Real>::of_parts([&](int p) { return __builtin_convertvector(v.part[p], Part); });
}

// Indices 0, 1, 2, ... of the lanes of one register (lanes_of_part), and of a whole vector (lanes).
template <class Number>
inline typename Vector<BitsOf<Number>>::Part lanes_of_part() {
  typename Vector<BitsOf<Number>>::Part out{};
  for (int q = 0; q < Vector<Number>::kPerPart; ++q) out[q] = q;
  return out;
}
template <class Real>
inline Int<Real> lanes() {
  return Int<Real>::of_parts([](int p) { return lanes_of_part<Real>() + p * Vec<Real>::kPerPart; });
}

template <class Real>
inline Vec<Real> turned_around(const Vec<Real>& v) {
  const auto last_first = Vec<Real>::kPerPart - 1 - lanes_of_part<Real>();
  return Vec<Real>::of_parts(
      [&](int p) { return __builtin_shuffle(v.part[kParts - 1 - p], last_first); });
}

// Transposes a T x T block about its antidiagonal, in squares as wide as a register: entry (r, q)
// goes to (T - 1 - q, T - 1 - r).
template <class Real>
inline void turn_about_antidiagonal(const Lanes<Real>* block, Lanes<Real>* turned) {
  constexpr int num = Vec<Real>::kPerPart;
  const auto q = lanes_of_part<Real>();
  for (int above = 0; above < kParts; ++above) {
    for (int left = 0; left < kParts; ++left) {
      typename Vec<Real>::Part row[num];
      for (int r = 0; r < num; ++r) {
        const Real* from = block[above * num + num - 1 - r].at + left * num;
        row[r] = __builtin_shuffle(load_part(from), num - 1 - q);
      }
      for (int apart = 1; apart < num; apart *= 2) {  // transpose: blocks of 1, 2, 4 ... swapped
        const auto step = ((q & apart) != 0) & (num - apart);
        for (int r = 0; r < num; ++r) {
          if (r & apart) continue;
          const auto a = row[r], b = row[r + apart];
          row[r] = __builtin_shuffle(a, b, q + step);
          row[r + apart] = __builtin_shuffle(a, b, q + step + apart);
        }
      }
      for (int r = 0; r < num; ++r) {
        Real* to = turned[(kParts - 1 - left) * num + r].at + (kParts - 1 - above) * num;
        std::memcpy(to, &row[r], sizeof row[r]);
      }
    }
  }
}

// The largest element. Comparisons with NaN are false, so a NaN is either ignored or returned,
// depending on its lane; if all elements are NaN, it is returned.
template <class Number>
inline Number largest(const Vector<Number>& v) {
  const auto q = lanes_of_part<Number>();
  auto most = v.part[0];
  for (int p = 1; p < kParts; ++p) most = v.part[p] > most ? v.part[p] : most;
  for (int apart = Vector<Number>::kPerPart / 2; apart > 0; apart /= 2) {
    const auto other = __builtin_shuffle(most, q ^ apart);
    most = other > most ? other : most;
  }
  return most[0];
}

template <class Bits>
inline bool any(const Vector<Bits>& is_true) {
  Bits at[kVectorBytes / sizeof(Bits)], found = 0;
  store(at, is_true);
  for (Bits bits : at) found |= bits;
  return found != 0;
}

// Loads num numbers, with -inf in the other lanes. Reads nothing beyond them.
template <class Real>
inline Vec<Real> load_some(const Real* from, int num) {
  if (num == Simd<Real>::T) return load(from);  // saves a call of memcpy
  Vec<Real> v = -Real(INFINITY);
  std::memcpy(v.part, from, num * sizeof(Real));
  return v;
}

// Stores the first num lanes.
template <class Real>
inline void store_some(Real* to, int num, const Vec<Real>& v) {
  if (num == Simd<Real>::T) return store(to, v);
  std::memcpy(to, &v, num * sizeof(Real));
}

// The shift that brings e^x just below 2^head: e^x * 2^-shift < 0.75 * 2^head. Mantissas and
// factors are kept that far above 1 so that 2^(smallest - head) of them is still a normal number.
template <class Real>
inline int shift_of(double x) {
  return int(__builtin_nearbyint(x * kLog2e)) + 1 - Simd<Real>::head;
}

// 2^e, or 0 where that is not a normal number. e is at most 127 (1023 in double).
template <class Real>
inline Real power_of_two(int e) {
  using S = Simd<Real>;
  if (e < Range<Real>::smallest) return 0;
  const auto bits = BitsOf<Real>(e + S::bias) << S::mantissa_bits;
  Real out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// v * 2^e for any e <= 127 (1023 in double), also where 2^e itself is not a normal number.
template <class Real>
inline Vec<Real> scaled(const Vec<Real>& v, int e) {
  const int least = Range<Real>::smallest;
  if (e >= least) return v * power_of_two<Real>(e);
  return v * power_of_two<Real>(least) * power_of_two<Real>(e - least);
}

// The exponent e with 0.5 <= x / 2^e < 1 for the largest element x, which must be a normal number;
// all elements must be >= 0.
template <class Real>
inline int exponent_of_largest(const Vec<Real>& v) {
  using S = Simd<Real>;
  return int(largest(bits_of<Real>(v)) >> S::mantissa_bits) - S::bias + 1;
}

constexpr double factorial(int d) { return d < 2 ? 1 : d * factorial(d - 1); }

// e^x * 2^-shift, 0 where that is below the smallest normal number; relative error about 1e-7
// (float) or 2e-16 (double). The shift goes into the exponent bits: subtracted from the scores, it
// would cost them digits.
template <class Real>
inline __attribute__((always_inline)) Vec<Real> exp_shifted(Vec<Real> x, int shift) {
  using S = Simd<Real>;
  const Vec<Real> low = -Real(1.5 * kLimit);
  x = select<Real>(low < x, x, low);
  const Vec<Real> k = (x * Real(kLog2e) + S::round) - S::round;
  // Exact even without FMA while |k| is below 2^15, that is, for any score within kLimit.
  const Vec<Real> r = (x - k * S::ln2_high) - k * S::ln2_low;
  Vec<Real> p = Real(1.0 / factorial(S::degree));
  for (int d = S::degree - 1; d >= 0; --d) p = p * r + Real(1.0 / factorial(d));  // |r| < 0.35
  const Int<Real> e = integers<Real>(k) - shift;
  const Vec<Real> scale = of_bits<Real>((e + S::bias) << S::mantissa_bits);
  return select<Real>(e < Range<Real>::smallest, Real(0), p * scale);
}

}  // namespace dag
