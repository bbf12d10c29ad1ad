// Words, bits and comparisons for the portable Vec, lane by lane.

template <class T>
struct Mask {
  bool x[Vec<T>::size];
  static Mask all() {
    Mask out;
    for (bool& lane : out.x) lane = true;
    return out;
  }
};

// out[i] = f(a[i], ...) over the lanes of `out`.
template <class Out, class F, class... In>
inline Out each(F f, const In&... in) {
  Out out;
  int i = 0;
  for (auto& lane : out.x) {
    lane = static_cast<std::remove_reference_t<decltype(lane)>>(f(in.x[i]...));
    ++i;
  }
  return out;
}

template <class To>
struct SameBits {
  template <class From>
  To operator()(From from) const {
    To to;
    static_assert(sizeof(To) == sizeof(From));
    std::memcpy(&to, &from, sizeof(To));
    return to;
  }
};

template <int N>
inline Vec<std::uint32_t> shift_right_signed(Vec<std::uint32_t> a) {
  return each<Vec<std::uint32_t>>([](std::uint32_t x) { return static_cast<std::int32_t>(x) >> N; }, a);
}
inline Vec<float> as_float(Vec<std::uint32_t> a) { return each<Vec<float>>(SameBits<float>(), a); }
inline Vec<std::uint32_t> bits_of(Vec<float> a) {
  return each<Vec<std::uint32_t>>(SameBits<std::uint32_t>(), a);
}
inline Vec<float> to_float(Vec<std::uint32_t> a) {
  return each<Vec<float>>([](std::uint32_t x) { return static_cast<std::int32_t>(x); }, a);
}
inline Mask<float> top_bit(Vec<std::uint32_t> a) {
  return each<Mask<float>>([](std::uint32_t x) { return x >> 31 != 0; }, a);
}

inline Vec<double> as_double(Vec<std::uint64_t> a) { return each<Vec<double>>(SameBits<double>(), a); }
inline Vec<std::uint64_t> bits_of(Vec<double> a) {
  return each<Vec<std::uint64_t>>(SameBits<std::uint64_t>(), a);
}
inline Mask<double> top_bit(Vec<std::uint64_t> a) {
  return each<Mask<double>>([](std::uint64_t x) { return x >> 63 != 0; }, a);
}
inline Vec<std::uint64_t> multiply_words(Vec<std::uint64_t> a, Vec<std::uint64_t> b) {
  const auto f = [](std::uint64_t x, std::uint64_t y) { return (x & 0xffffffffu) * (y & 0xffffffffu); };
  return each<Vec<std::uint64_t>>(f, a, b);
}
inline Vec<std::uint64_t> high_word(Vec<std::uint64_t> a) {
  return each<Vec<std::uint64_t>>([](std::uint64_t x) { return x >> 32; }, a);
}
inline Vec<std::uint32_t> words_of(const Vec<std::uint64_t>* parts) {
  Vec<std::uint32_t> out;
  constexpr int half = Vec<std::uint64_t>::size;
  for (int i = 0; i < 2 * half; ++i) out.x[i] = static_cast<std::uint32_t>(parts[i / half].x[i % half]);
  return out;
}
inline Vec<float> operator/(Vec<float> a, Vec<float> b) {
  return each<Vec<float>>([](float x, float y) { return x / y; }, a, b);
}
inline Vec<double> operator/(Vec<double> a, Vec<double> b) {
  return each<Vec<double>>([](double x, double y) { return x / y; }, a, b);
}
template <class T>
inline Mask<T> less(Vec<T> a, Vec<T> b) {
  return each<Mask<T>>([](T x, T y) { return x < y; }, a, b);
}
template <class T>
inline void store_rounded(Vec<double> a, T* p) {
  for (double lane : a.x) *p++ = static_cast<T>(lane);
}

template <class T>
inline Mask<T> operator&(Mask<T> a, Mask<T> b) {
  return each<Mask<T>>([](bool x, bool y) { return x && y; }, a, b);
}
template <class T>
inline Mask<T> operator|(Mask<T> a, Mask<T> b) {
  return each<Mask<T>>([](bool x, bool y) { return x || y; }, a, b);
}
inline Mask<double> without(Mask<double> a, Mask<double> b) {
  return each<Mask<double>>([](bool x, bool y) { return x && !y; }, a, b);
}
template <class T>
inline bool any(Mask<T> a) {
  bool result = false;
  for (bool lane : a.x) result = result || lane;
  return result;
}
template <class T>
inline Vec<T> select(Mask<T> mask, Vec<T> a, Vec<T> b) {
  return each<Vec<T>>([](bool which, T x, T y) { return which ? x : y; }, mask, a, b);
}
template <class T>
inline Vec<T> sqrt(Vec<T> a) {
  return each<Vec<T>>([](T x) { return std::sqrt(x); }, a);
}
template <class T>
inline Vec<T> operator^(Vec<T> a, Vec<T> b) {
  return each<Vec<T>>([](T x, T y) { return x ^ y; }, a, b);
}
template <class T>
inline Vec<T> operator&(Vec<T> a, Vec<T> b) {
  return each<Vec<T>>([](T x, T y) { return x & y; }, a, b);
}
template <class T>
inline Vec<T> operator|(Vec<T> a, Vec<T> b) {
  return each<Vec<T>>([](T x, T y) { return x | y; }, a, b);
}
template <class T>
inline Vec<T> xor3(Vec<T> a, Vec<T> b, Vec<T> c) {
  return a ^ b ^ c;
}
template <int N, class T>
inline Vec<T> shift_left(Vec<T> a) {
  return each<Vec<T>>([](T x) { return x << N; }, a);
}
template <int N, class T>
inline Vec<T> shift_right(Vec<T> a) {
  return each<Vec<T>>([](T x) { return x >> N; }, a);
}
