// Operators of a Vec whose `x` has them itself: a number, or a vector of the compiler's.

template <class T>
FASTLIN_HD inline Vec<T> operator+(Vec<T> a, Vec<T> b) {
  return {a.x + b.x};
}
template <class T>
FASTLIN_HD inline Vec<T> operator-(Vec<T> a, Vec<T> b) {
  return {a.x - b.x};
}
template <class T>
FASTLIN_HD inline Vec<T> operator*(Vec<T> a, Vec<T> b) {
  return {a.x * b.x};
}
template <class T>
FASTLIN_HD inline Vec<T> operator/(Vec<T> a, Vec<T> b) {
  return {a.x / b.x};
}
template <class T>
FASTLIN_HD inline Vec<T> operator^(Vec<T> a, Vec<T> b) {
  return {a.x ^ b.x};
}
template <class T>
FASTLIN_HD inline Vec<T> operator&(Vec<T> a, Vec<T> b) {
  return {a.x & b.x};
}
template <class T>
FASTLIN_HD inline Vec<T> operator|(Vec<T> a, Vec<T> b) {
  return {a.x | b.x};
}
template <int N, class T>
FASTLIN_HD inline Vec<T> shift_left(Vec<T> a) {
  return {a.x << N};
}
template <int N, class T>
FASTLIN_HD inline Vec<T> shift_right(Vec<T> a) {
  return {a.x >> N};
}
