// Normals in float by Box-Muller, from words in lanes of 32 bits: w0 gives the radius, w1 the angle. About 50
// operations for two normals. Included once for each kind of lane, after its Vec.
//
// For every word, r has a relative error below 4 eps, and cos and sin an absolute error below 2.5 eps, eps =
// 2^-23; tests/data/test_draws.py adds them up.

// The square root of a number from 2^-100 to 2^100, which a GPU takes without a branch.
template <class F>
FASTLIN_HD FASTLIN_INLINE F sqrt_in_range(F x) {
  return sqrt(x);
}

// -2 log u, u = (w + 1/2) 2^-32. x is the smaller of u and 1 - u; integers give both, so that 1 - u loses no
// bit near 1. u = 2^e (1 + f), 1/sqrt 2 <= 1 + f < sqrt 2, and f = -x at e = 0.
template <class F, class I>
FASTLIN_HD FASTLIN_INLINE F minus_two_log(I w) {
  const I sign = shift_right_signed<31>(w);  // ones where u > 1/2
  const F x = fma(to_float(w ^ sign), F::set(0x1p-32f), F::set(0x1p-33f));
  const F u = select(top_bit(w), F::set(1.0f) - x, x);
  const I half = I::set(0x3f3504f3u);  // bits of 1/sqrt 2
  const I d = bits_of(u) - half;
  const I e = shift_right_signed<23>(d);
  const F m = as_float((d & I::set(0x007fffffu)) + half);
  const F f = select(top_bit(e), m - F::set(1.0f), F::zero() - x);
  // (f - log(1 + f)) 2 / f^2, to a relative error of 3e-8 in the logarithm.
  const F f2 = f * f;
  const F q01 = fma(F::set(-0.66667902f), f, F::set(0.99999982f));
  const F q23 = fma(F::set(-0.39924082f), f, F::set(0.50003499f));
  const F q45 = fma(F::set(-0.29837015f), f, F::set(0.33141288f));
  const F q67 = fma(F::set(-0.17463814f), f, F::set(0.28613213f));
  const F q = fma(fma(q67, f2, q45), f2 * f2, fma(q23, f2, q01));
  const F log1p = f * fma(q, f, F::set(-2.0f));
  return fma(to_float(e), F::set(-1.38629436f), log1p);
}

// The angle in quarters of a turn is q + a, |a| <= 1/2: the top bits of w + 2^29 are q, and the rest of w is
// a as a signed number.
template <class F, class I>
FASTLIN_HD FASTLIN_INLINE void box_muller(I w0, I w1, F& first, F& second) {
  const F r = sqrt_in_range(minus_two_log<F>(w0));
  const float kUnit = 0x1p-32f * 1.57079633f;  // the shift by 2 moves the sign to the top bit
  const F a = fma(to_float(shift_left<2>(w1)), F::set(kUnit), F::set(2 * kUnit));
  const F z = a * a;
  const F s = fma(fma(F::set(-1.9517267e-4f), z, F::set(8.332178e-3f)), z, F::set(-0.16666655f));
  const F c = fma(fma(F::set(2.4438415e-5f), z, F::set(-1.3887368e-3f)), z, F::set(4.1666646e-2f));
  const F sine = fma(a * z, s, a), cosine = fma(fma(c, z, F::set(-0.5f)), z, F::set(1.0f));
  const I quarter = w1 + I::set(0x20000000u), top = I::set(0x80000000u);
  const auto swap = top_bit(shift_left<1>(quarter));
  const I cosine_sign = (quarter + I::set(0x40000000u)) & top, sine_sign = quarter & top;
  first = r * as_float(bits_of(select(swap, sine, cosine)) ^ cosine_sign);
  second = r * as_float(bits_of(select(swap, cosine, sine)) ^ sine_sign);
}
