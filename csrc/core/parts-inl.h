// Several vectors as one. Each operation runs on all parts before the next one, so that dependent operations
// are far apart in the code. A CPU looks ahead by about 100 operations: of two long computations one after
// the other it would see only one at a time.

template <class V, int N>
struct Parts {
  V part[N];

  template <class T>
  FASTLIN_HD FASTLIN_INLINE static Parts set(T value) {
    Parts out;
    FASTLIN_UNROLL
    for (int i = 0; i < N; ++i) out.part[i] = V::set(value);
    return out;
  }
  FASTLIN_HD FASTLIN_INLINE static Parts zero() {
    Parts out;
    FASTLIN_UNROLL
    for (int i = 0; i < N; ++i) out.part[i] = V::zero();
    return out;
  }
  FASTLIN_HD FASTLIN_INLINE static Parts all() {
    Parts out;
    FASTLIN_UNROLL
    for (int i = 0; i < N; ++i) out.part[i] = V::all();
    return out;
  }
};

#define FASTLIN_OF_ONE(name)                                                            \
  template <class V, int N>                                                             \
  FASTLIN_HD FASTLIN_INLINE auto name(Parts<V, N> a) -> Parts<decltype(name(V{})), N> { \
    Parts<decltype(name(V{})), N> out;                                                  \
    FASTLIN_UNROLL                                                                      \
    for (int i = 0; i < N; ++i) out.part[i] = name(a.part[i]);                          \
    return out;                                                                         \
  }
#define FASTLIN_OF_TWO(name)                                                                                \
  template <class V, int N>                                                                                 \
  FASTLIN_HD FASTLIN_INLINE auto name(Parts<V, N> a, Parts<V, N> b) -> Parts<decltype(name(V{}, V{})), N> { \
    Parts<decltype(name(V{}, V{})), N> out;                                                                 \
    FASTLIN_UNROLL                                                                                          \
    for (int i = 0; i < N; ++i) out.part[i] = name(a.part[i], b.part[i]);                                   \
    return out;                                                                                             \
  }
#define FASTLIN_SHIFT(name)                                         \
  template <int kBits, class V, int N>                              \
  FASTLIN_HD FASTLIN_INLINE Parts<V, N> name(Parts<V, N> a) {       \
    FASTLIN_UNROLL                                                  \
    for (int i = 0; i < N; ++i) a.part[i] = name<kBits>(a.part[i]); \
    return a;                                                       \
  }
FASTLIN_OF_ONE(sqrt)
FASTLIN_OF_ONE(bits_of)
FASTLIN_OF_ONE(as_float)
FASTLIN_OF_ONE(as_double)
FASTLIN_OF_ONE(to_float)
FASTLIN_OF_ONE(top_bit)
FASTLIN_OF_TWO(operator+)
FASTLIN_OF_TWO(operator-)
FASTLIN_OF_TWO(operator*)
FASTLIN_OF_TWO(operator/)
FASTLIN_OF_TWO(operator^)
FASTLIN_OF_TWO(operator&)
FASTLIN_OF_TWO(operator|)
FASTLIN_OF_TWO(less)
FASTLIN_OF_TWO(without)
FASTLIN_SHIFT(shift_left)
FASTLIN_SHIFT(shift_right)
FASTLIN_SHIFT(shift_right_signed)
#undef FASTLIN_OF_ONE
#undef FASTLIN_OF_TWO
#undef FASTLIN_SHIFT

template <class V, int N>
FASTLIN_HD FASTLIN_INLINE Parts<V, N> fma(Parts<V, N> a, Parts<V, N> b, Parts<V, N> c) {
  FASTLIN_UNROLL
  for (int i = 0; i < N; ++i) c.part[i] = fma(a.part[i], b.part[i], c.part[i]);
  return c;
}

template <class M, class V, int N>
FASTLIN_HD FASTLIN_INLINE Parts<V, N> select(Parts<M, N> mask, Parts<V, N> a, Parts<V, N> b) {
  FASTLIN_UNROLL
  for (int i = 0; i < N; ++i) b.part[i] = select(mask.part[i], a.part[i], b.part[i]);
  return b;
}

template <class M, int N>
FASTLIN_HD FASTLIN_INLINE bool any(Parts<M, N> mask) {
  FASTLIN_UNROLL
  for (int i = 1; i < N; ++i) mask.part[0] = mask.part[0] | mask.part[i];
  return any(mask.part[0]);
}
