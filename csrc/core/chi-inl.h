// Normals and chi variates in double, and the first attempt of a chi variate in float. In double the
// operations and their order are those of fastlin/data/chi.py, so that the bits are the same everywhere:
// nothing is fused, and there is nothing but +, -, *, /, sqrt and comparisons. D is a vector of doubles or a
// double, W the same lanes as 64-bit integers. Included once for each kind of lane, after its Vec and
// normal-inl.h.

// (w + 1/2) 2^-32: the bits become the fraction of a number in [1, 2); then 1 is subtracted.
template <class D, class W>
FASTLIN_HD FASTLIN_INLINE D uniform(W word) {
  const W fraction = shift_right<12>(shift_left<32>(word));
  return as_double(fraction | W::set(0x3ff0000000080000u)) - D::set(1.0);
}

template <class D, int N>
FASTLIN_HD FASTLIN_INLINE D horner(const double (&coefficients)[N], D x) {
  D out = D::set(coefficients[N - 1]);
  FASTLIN_UNROLL
  for (int j = N - 2; j >= 0; --j) out = out * x + D::set(coefficients[j]);
  return out;
}

// e log 2 + log m with t = 2^e m, 1/sqrt 2 <= m < sqrt 2. At e = 0 the caller's s replaces m - 1.
template <bool kHasS, class D>
FASTLIN_HD FASTLIN_INLINE D log_of(D t, D s) {
  constexpr double kAtanh[] = {2.0 / 1,  2.0 / 3,  2.0 / 5,  2.0 / 7,  2.0 / 9,  2.0 / 11,
                               2.0 / 13, 2.0 / 15, 2.0 / 17, 2.0 / 19, 2.0 / 21, 2.0 / 23};
  const auto bits = bits_of(t);
  using W = std::remove_const_t<decltype(bits)>;
  const W half = W::set(0x3fe6a09e667f3bcdu), one = W::set(0x3ff0000000000000u);  // 1/sqrt 2, 1
  const W d = bits - half + one;  // e + 1023 above 52 bits of m's distance from 1/sqrt 2
  const D m = as_double((d & W::set(0x000fffffffffffffu)) + half);
  // The bits of 2^52 + n are those of 2^52 plus n.
  const D e = as_double(shift_right<52>(d) | W::set(0x4330000000000000u)) - D::set(0x1p52 + 1023);
  D numerator = m - D::set(1.0);
  if constexpr (kHasS) numerator = select(less(e * e, D::set(0.5)), s, numerator);
  const D r = numerator / (numerator + D::set(2.0));
  return e * D::set(0.6931471805599453) + r * horner(kAtanh, r * r);
}

template <class D>
FASTLIN_HD FASTLIN_INLINE D log(D t) {
  return log_of<false>(t, t);
}

template <class D>
FASTLIN_HD FASTLIN_INLINE D log1p(D s) {
  return log_of<true>(D::set(1.0) + s, s);
}

// Box-Muller. The angle in quarters of a turn is q + a, |a| <= 1/2: the top bits of w + 2^29 are q, and the
// 30 below, 1/2 after them, are a + 1/2.
template <class D, class W>
FASTLIN_HD FASTLIN_INLINE void fixed_box_muller(W w0, W w1, D& first, D& second) {
  constexpr double kSin[] = {1.0,          -1.0 / 6,        1.0 / 120,          -1.0 / 5040,
                             1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800.0, -1.0 / 1307674368000.0};
  constexpr double kCos[] = {1.0,
                             -1.0 / 2,
                             1.0 / 24,
                             -1.0 / 720,
                             1.0 / 40320,
                             -1.0 / 3628800,
                             1.0 / 479001600,
                             -1.0 / 87178291200.0,
                             1.0 / 20922789888000.0};
  const D r = sqrt(D::set(-2.0) * log(uniform<D>(w0)));
  const W quarter = w1 + W::set(0x20000000u), sign = W::set(0x8000000000000000u);
  const W fraction = shift_right<12>(shift_left<34>(quarter));
  const D a = (as_double(fraction | W::set(0x3ff0000000200000u)) - D::set(1.5)) * D::set(1.5707963267948966);
  const D square = a * a;
  const D sine = a * horner(kSin, square), cosine = horner(kCos, square);
  const auto swap = top_bit(shift_left<33>(quarter));
  const W cosine_sign = shift_left<32>(quarter + W::set(0x40000000u)) & sign;
  const W sine_sign = shift_left<32>(quarter) & sign;
  first = r * as_double(bits_of(select(swap, sine, cosine)) ^ cosine_sign);
  second = r * as_double(bits_of(select(swap, cosine, sine)) ^ sine_sign);
}

// Constants of an attempt in float (float_attempt).
struct FloatFreedom {
  float inverse_scale, squeeze, limit, root;
};

// Constants of the rejection sampler for `freedom` degrees of freedom. In float every attempt of 0 and 1
// degrees is accepted; beyond 10^12 nothing is settled.
struct Freedom : FloatFreedom {
  FASTLIN_HD explicit Freedom(std::int64_t freedom)
      : k(static_cast<double>(freedom)),
        shape(0.5 * (k > 1.0 ? k : 1.0) - 1.0 / 3.0),
        scale(std::sqrt(9.0 * shape)) {
    inverse_scale = k > 1.0 ? static_cast<float>(1.0 / scale) : 0.0f;
    squeeze = k > 1.0 ? static_cast<float>(1.0 / (108.0 * shape)) : 0.0f;
    limit = k <= 1.0 ? 2.0f : k <= 1e12 ? 1.0f - 0x1p-15f : -1.0f;
    root = k > 0.0 ? static_cast<float>(std::sqrt(2.0 * shape)) : 0.0f;
  }
  double k, shape, scale;
};

// One chi variate in each lane, attempt by attempt; 0 for zero degrees of freedom.
template <class D, class W>
class Chi {
  using Which = decltype(less(D{}, D{}));

 public:
  D value = D::zero();

  FASTLIN_HD FASTLIN_INLINE Chi(D k, D shape, D scale)
      : shape_(shape),
        scale_(scale),
        sure_(select(less(k, D::set(1e12 + 1)), D::set(1.0 - 1e-6), D::zero())),
        one_(less(k, D::set(1.5))),
        waiting_(less(D::set(0.5), k)) {}

  // Makes the two attempts of a block of words. Returns whether a lane needs another block.
  FASTLIN_HD FASTLIN_INLINE bool block(const W (&word)[4]) {
    D first, second;
    fixed_box_muller(word[0], word[1], first, second);
    attempt(first, word[2]);
    if (!any(waiting_)) return false;
    attempt(second, word[3]);
    return any(waiting_);
  }

 private:
  FASTLIN_HD FASTLIN_INLINE void attempt(D x, W word) {
    const D one = D::set(1.0), u = uniform<D>(word);
    D s = x / scale_, t = one + s;
    const Which positive = less(D::zero(), t);
    s = select(positive, s, D::zero());
    t = select(positive, t, one);
    const D cube = t * t * t, square = x * x;
    // With d = k/2 - 1/3, the right side of the exact test is 3 d (log(1 + s) - s + s^2/2 - s^3/3), which is
    // at least -3/2 d s^4 for |s| <= 1/2, and log u <= u - 1. So the second line of `soon` decides 99.8 % of
    // attempts at k = 50 without logarithms; the first line, which is the oracle's, decides 92 %. Rounding
    // moves the two sides of the oracle's test by at most d |s| 10 eps, 4e-9 up to k = 10^12: far less than
    // 1e-6, so the decision is the same.
    const D fourth = s * s * (s * s);
    const Which soon = less(u, one - D::set(0.0331) * (square * square)) |
                       (less(fourth, D::set(0.0625)) & less(u, sure_ - D::set(1.5) * shape_ * fourth));
    Which accepted = one_ | (positive & soon);
    if (any(without(waiting_ & positive, soon))) {
      const D bend = D::set(3.0) * (log1p(s) - s) - (D::set(3.0) + s) * s * s;
      accepted = accepted | (positive & less(log(u), D::set(0.5) * square + shape_ * bend));
    }
    const D absolute = as_double(bits_of(x) & W::set(0x7fffffffffffffffu));
    const D candidate = select(one_, absolute, sqrt(D::set(2.0) * shape_ * cube));
    value = select(waiting_ & accepted, candidate, value);
    waiting_ = without(waiting_, accepted);
  }

  D shape_, scale_, sure_;
  Which one_, waiting_;
};

// An attempt in float: its value, and the lanes that stay open. In all others the definition accepts it. With
// d = k/2 - 1/3 the exact test is
//
//   log u < f(s) = 3 d (log(1 + s) - s + s^2/2 - s^3/3),     f(s) >= -3/4 d s^4 h,    h = 1 - 0.8 s + 1.2 s^2
//
// for s >= -1/2: f' = -3 d s^3 / (1 + s) with 1 / (1 + s) <= 1 - s + s^2 for s > 0; and below 0 the series
// |s|^4/4 + |s|^5/5 + ... of -f / 3 d is at most (1 + 0.8 |s| + 1.18 s^2) s^4/4. As log u <= u - 1, the
// attempt is accepted if u + b < 1 - 1e-6, b = x^4 h / (108 d); the 1e-6 covers the rounding of the
// definition (Chi::attempt).
//
// In float, eps = 2^-23, x is off by 7 eps r (normal-inl.h) with r <= 6.77 as u_0 >= 2^-33: by 5.7e-6. Where
// b <= 1, |db/dx| is below 2.5: it is b/|x| times 4 + s h'/h <= 5.2 (at s <= 1), and |x| >= 2.5 b^1/4; beyond
// s = 1 only k = 2 has b <= 1, with |x| > 2.4 and a factor of 6. So b is off by 1.43e-5, and by 6 eps of its
// own roundings; u by eps. That is 1.6e-5, and 1.7e-5 with the above: the limit keeps 3e-5. s > -0.49 stays
// above -1/2.
//
// The value sqrt(2 d) t^3/2, t = 1 + s, is off by at most eps (3 chi + 5.7 r sqrt t): four roundings and 3/2
// of that of t are 2.75 eps chi; s is off by 8 eps r / sqrt(9 d), which 3/2 sqrt(2 d t) takes to 5.7 eps r
// sqrt t.
template <class F, class I>
FASTLIN_HD FASTLIN_INLINE auto float_attempt(F x, I word, const FloatFreedom& freedom, F& value) {
  const F u = fma(to_float(word ^ I::set(0x80000000u)), F::set(0x1p-32f), F::set(0.5f));
  const F s = x * F::set(freedom.inverse_scale), t = F::set(1.0f) + s, square = x * x;
  const F h = fma(fma(F::set(1.2f), s, F::set(-0.8f)), s, F::set(1.0f));
  const F sum = fma(square * square * F::set(freedom.squeeze), h, u);
  value = F::set(freedom.root) * t * sqrt_in_range(t);  // t > 1/2 where the attempt is accepted
  return less(F::set(freedom.limit), sum) | less(s, F::set(-0.49f));
}

// The lanes in which the definition might accept an attempt. In all others it rejects it: with delta = 1 - u
// <= 1/2, log u >= -delta - delta^2, and f(s) <= -3/4 d s^4 (1 - 0.8 s), as 1 / (1 + s) >= 1 - s, and as the
// series has its first two terms. So it rejects where delta + delta^2 is below b = x^4 (1 - 0.8 s) / (108 d)
// and delta below 0.0331 x^4, the oracle's first test, both by 3e-5: for |s| <= 1/2 and b <= 1, b is off by
// 4.3 b/|x| 5.7e-6 <= 1e-5 and a few eps, 0.0331 x^4 <= 1 by 1.72 * 5.7e-6 = 9.8e-6; where they are above 1,
// by as much of themselves, and the sums are below 3/4.
template <class F, class I>
FASTLIN_HD FASTLIN_INLINE auto not_surely_rejected(F x, I word, const FloatFreedom& freedom) {
  const F half = F::set(0.5f), margin = F::set(1.0f - freedom.limit);
  const F delta = fma(to_float(word ^ I::set(0x80000000u)), F::set(-0x1p-32f), half);
  const F s = x * F::set(freedom.inverse_scale), square = x * x, fourth = square * square;
  const F b = fourth * F::set(freedom.squeeze) * fma(F::set(-0.8f), s, F::set(1.0f));
  return less(b, fma(delta, delta, delta) + margin) | less(F::set(0.0331f) * fourth, delta + margin) |
         less(half, delta) | less(s, F::set(-0.49f)) | less(half, s);
}
