// Functions on vectors that several instruction sets share. Included inside a target region.

// log2(size) rounds of zips; each round turns r[i] and r[i + size / 2] into r[2 i] and r[2 i + 1].
template <class V, int N>
FASTLIN_INLINE void transpose_by_zips(V (&r)[N]) {
  V next[N];
  FASTLIN_UNROLL
  for (int round = 1; round < N; round *= 2) {
    FASTLIN_UNROLL
    for (int i = 0; i < N / 2; ++i) V::zip(r[i], r[i + N / 2], next[2 * i], next[2 * i + 1]);
    FASTLIN_UNROLL
    for (int i = 0; i < N; ++i) r[i] = next[i];
  }
}

// Lane i of the result is the sum of r[i]. Each round adds the halves of two vectors: 2 (size - 1) zips in
// all, where a transpose takes size * log2(size).
template <class V, int N>
FASTLIN_INLINE V sums_by_zips(V (&r)[N]) {
  FASTLIN_UNROLL
  for (int half = N / 2; half >= 1; half /= 2) {
    FASTLIN_UNROLL
    for (int i = 0; i < half; ++i) {
      V low, high;
      V::zip(r[i], r[i + half], low, high);
      r[i] = low + high;
    }
  }
  return r[0];
}

// r[j] = element j of each row.
template <class V, int N, class T>
FASTLIN_INLINE void load_columns_by_transpose(const T* const* rows, std::int64_t offset, V (&r)[N]) {
  FASTLIN_UNROLL
  for (int i = 0; i < N; ++i) r[i] = V::load(rows[i] + offset);
  V::transpose(r);
}

// The same by quads: row i + 4 k goes to quad k of r[i], and 8 shuffles remain. 8 floats of AVX2 take 12
// shuffles, where a transpose takes 24.
template <class V, class T>
FASTLIN_INLINE void load_columns_by_quads(const T* const* rows, std::int64_t offset, V (&r)[4]) {
  FASTLIN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const T* quad_rows[V::quads];
    FASTLIN_UNROLL
    for (int k = 0; k < V::quads; ++k) quad_rows[k] = rows[i + 4 * k];
    r[i] = V::load_quads(quad_rows, offset);
  }
  V::transpose_quads(r);
}

// Loads and stores the first elements on machines without masks.
template <class V, class T>
inline V load_some(const T* p, int count) {
  T lanes[V::size] = {};
  for (int i = 0; i < V::size && i < count; ++i) lanes[i] = p[i];
  return V::load(lanes);
}

template <class V, class T>
inline void store_some(V value, T* p, int count) {
  T lanes[V::size];
  value.store(lanes);
  for (int i = 0; i < V::size && i < count; ++i) p[i] = lanes[i];
}
