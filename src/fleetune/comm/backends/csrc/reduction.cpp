#include "reduction.h"

#pragma GCC optimize("O3")  // the one place of these sources that computes

#include <algorithm>
#include <array>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <type_traits>

namespace fleetune {

namespace {

/** Numbers at a time, so that sums stay in the cache. */
constexpr size_t kTile = 1024;

template <typename T>
struct AccumulatorOf {
  using type = T;
};
template <>
struct AccumulatorOf<c10::Half> {
  using type = float;
};
template <>
struct AccumulatorOf<c10::BFloat16> {
  using type = float;
};

template <typename T>
T wrapped(T a, T b, bool is_product) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    // uint16 times uint16 would be computed, and overflow, as int
    using Wide = std::conditional_t<(sizeof(U) < sizeof(unsigned)), unsigned, U>;
    const Wide x = static_cast<U>(a), y = static_cast<U>(b);
    return static_cast<T>(is_product ? x * y : x + y);
  } else {
    return is_product ? a * b : a + b;
  }
}

struct Sum {
  template <typename A>
  static A of(A a, A b) {
    return wrapped(a, b, false);
  }
};
struct Product {
  template <typename A>
  static A of(A a, A b) {
    return wrapped(a, b, true);
  }
};
struct Min {
  template <typename A>
  static A of(A a, A b) {
    return b < a ? b : a;
  }
};
struct Max {
  template <typename A>
  static A of(A a, A b) {
    return a < b ? b : a;
  }
};
struct BitAnd {
  template <typename A>
  static A of(A a, A b) {
    return static_cast<A>(a & b);
  }
};
struct BitOr {
  template <typename A>
  static A of(A a, A b) {
    return static_cast<A>(a | b);
  }
};
struct BitXor {
  template <typename A>
  static A of(A a, A b) {
    return static_cast<A>(a ^ b);
  }
};

template <typename T, typename Op>
void reduce_as(const void* blocks, size_t num_blocks, size_t count, void* out, int divisor) {
  using A = typename AccumulatorOf<T>::type;
  const T* in = static_cast<const T*>(blocks);
  T* result = static_cast<T*>(out);
  std::array<A, kTile> sums;
  for (size_t start = 0; start < count; start += kTile) {
    const size_t n = std::min(kTile, count - start);
    for (size_t i = 0; i < n; ++i) sums[i] = static_cast<A>(in[start + i]);
    for (size_t block = 1; block < num_blocks; ++block) {
      const T* row = in + block * count + start;
      for (size_t i = 0; i < n; ++i) sums[i] = Op::of(sums[i], static_cast<A>(row[i]));
    }
    if (divisor != 1) {
      for (size_t i = 0; i < n; ++i) sums[i] = static_cast<A>(sums[i] / static_cast<A>(divisor));
    }
    for (size_t i = 0; i < n; ++i) result[start + i] = static_cast<T>(sums[i]);
  }
}

using Reduce = void (*)(const void*, size_t, size_t, void*, int);

template <typename T>
Reduce arithmetic_for(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum: return reduce_as<T, Sum>;
    case Reduction::product: return reduce_as<T, Product>;
    case Reduction::min: return reduce_as<T, Min>;
    case Reduction::max: return reduce_as<T, Max>;
    default: return nullptr;
  }
}

template <typename T>
Reduce integer_for(Reduction reduction) {
  switch (reduction) {
    case Reduction::band: return reduce_as<T, BitAnd>;
    case Reduction::bor: return reduce_as<T, BitOr>;
    case Reduction::bxor: return reduce_as<T, BitXor>;
    default: return arithmetic_for<T>(reduction);
  }
}

Reduce function_for(Element element, Reduction reduction) {
  switch (element) {
    case Element::int8: return integer_for<int8_t>(reduction);
    case Element::uint8: return integer_for<uint8_t>(reduction);
    case Element::int16: return integer_for<int16_t>(reduction);
    case Element::int32: return integer_for<int32_t>(reduction);
    case Element::int64: return integer_for<int64_t>(reduction);
    case Element::float16: return arithmetic_for<c10::Half>(reduction);
    case Element::bfloat16: return arithmetic_for<c10::BFloat16>(reduction);
    case Element::float32: return arithmetic_for<float>(reduction);
    case Element::float64: return arithmetic_for<double>(reduction);
    default: return nullptr;
  }
}

}  // namespace

size_t size_of(Element element) {
  switch (element) {
    case Element::int8: case Element::uint8: return 1;
    case Element::int16: case Element::float16: case Element::bfloat16: return 2;
    case Element::int32: case Element::float32: return 4;
    case Element::complex128: return 16;
    default: return 8;
  }
}

void reduce_blocks(const void* blocks, size_t num_blocks, size_t count, void* out, Element element,
                   Reduction reduction, int divisor) {
  const Reduce reduce = function_for(element, reduction);
  if (reduce == nullptr) throw TransportError("there is no such reduction of such numbers");
  reduce(blocks, num_blocks, count, out, divisor);
}

}  // namespace fleetune
