// Matrix layers of a stack, on one tile: T = rho I + scale sum_h A_h G C_h, G <- T' G T, q <- T' q, and the
// reverse mode in the letters of fastlin/backends/eager.py. Forward takes 2 H + 1.5 products of m x m
// matrices and reverse 4 H + 2.5, each m^3 multiply-adds a sequence, without sums over lanes. G, T, G T, A_h
// G and q are kept for the reverse: they fit L1 or L2 at the widths of this field, and recomputing them would
// cost 3 H + 2 products.

template <class T>
class Layers {
  using V = Vec<T>;
  static constexpr std::int64_t N = V::size;

 public:
  FASTLIN_HD Layers(Arena& arena, const Problem<T>& P, const Results<T>& out)
      : P(P), out(out), m(P.m), square(P.m * P.m * N), scale(static_cast<T>(P.scale)) {
    const std::int64_t layers = P.layers;
    qb = arena.take<T>(m * N);
    if (layers == 0) return;
    G = arena.take<T>((layers + 1) * square);
    T_ = arena.take<T>(layers * square);
    GT = arena.take<T>(layers * square);
    AG = arena.take<T>(layers * P.H * square);
    q = arena.take<T>((layers + 1) * m * N);
    Tb = arena.take<T>(square);
    work = arena.take<T>(square);
    through = arena.take<T>(square);
    Gb = arena.take<T>(square);
    sums = arena.take<T>(2 * layers * P.H * square);
  }

  // G [m, m] and q [m] after these layers.
  FASTLIN_HD const T* last_G() const { return G + P.layers * square; }
  FASTLIN_HD const T* last_q() const { return q + P.layers * m * N; }
  FASTLIN_HD T* first_G() { return G; }
  FASTLIN_HD T* first_q() { return q; }
  T *Gb = nullptr, *qb;  // dloss/dG and dloss/dq, input and output of `reverse`

  FASTLIN_HD void forward(std::int64_t r) {
    for (std::int64_t l = 0; l < P.layers; ++l) {
      T *Gl = G + l * square, *Tl = T_ + l * square, *GTl = GT + l * square;
      Tile<T>::zero(Tl, m * m);
      const V rho = V::set(static_cast<T>(l == 0 ? P.first_skip : P.skip));
      for (std::int64_t i = 0; i < m; ++i) Tile<T>::put(Tl, i * m + i, rho);
      for (std::int64_t h = 0; h < P.H; ++h) {
        T* AGl = AG + (l * P.H + h) * square;
        const T *A = parameter(P.A, r, l, h), *C = parameter(P.C, r, l, h);
        product(m, m, m, NumbersAlong<T>{A, m}, Across<T>{Gl, m}, ToAcross<T>{AGl, m});
        // (A G C)' = C' (A G)', so that the broadcast factor is on the left here too.
        product(m, m, m, NumbersAcross<T>{C, m}, Along<T>{AGl, m}, ToAlong<T>{Tl, m, scale, Tl});
      }
      product(m, m, m, Across<T>{Gl, m}, Across<T>{Tl, m}, ToAcross<T>{GTl, m});
      symmetric_product(m, m, Across<T>{Tl, m}, Across<T>{GTl, m}, ToAcross<T>{Gl + square, m});
      const T* ql = q + l * m * N;
      product_column(m, m, Across<T>{Tl, m}, Along<T>{ql, 0}, ToAlong<T>{q + (l + 1) * m * N, 0});
    }
  }

  // Carries Gb and qb back through the layers, and adds to the lanes' sums of dA and dC.
  FASTLIN_HD void reverse(std::int64_t r) {
    for (std::int64_t l = P.layers - 1; l >= 0; --l) {
      const T *Gl = G + l * square, *Tl = T_ + l * square, *GTl = GT + l * square, *ql = q + l * m * N;
      // Tb = q qb' + 2 G T Gb
      product(m, m, 1, Across<T>{ql, 0}, Across<T>{qb, 0}, ToAcross<T>{Tb, m});
      product(m, m, m, Along<T>{GTl, m}, Across<T>{Gb, m}, ToAcross<T>{Tb, m, T(2), Tb});
      // Gb <- T Gb T'
      product(m, m, m, Along<T>{Tl, m}, Across<T>{Gb, m}, ToAcross<T>{work, m});
      symmetric_product(m, m, Along<T>{work, m}, Along<T>{Tl, m}, ToAcross<T>{Gb, m});
      for (std::int64_t h = 0; h < P.H; ++h) {
        const T *A = parameter(P.A, r, l, h), *C = parameter(P.C, r, l, h);
        const T* AGl = AG + (l * P.H + h) * square;
        if (out.dC != nullptr) {
          product(m, m, m, Across<T>{AGl, m}, Across<T>{Tb, m}, ToAcross<T>{dC(l, h), m, scale, dC(l, h)});
        }
        // Tb C', for both dA and Gb.
        product(m, m, m, NumbersAlong<T>{C, m}, Along<T>{Tb, m}, ToAlong<T>{work, m});
        if (out.dA != nullptr) {
          product(m, m, m, Along<T>{work, m}, Across<T>{Gl, m}, ToAcross<T>{dA(l, h), m, scale, dA(l, h)});
        }
        product(m, m, m, NumbersAcross<T>{A, m}, Across<T>{work, m},
                ToAcross<T>{through, m, scale / 2, h > 0 ? through : nullptr});
      }
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j < m; ++j) {
          const V sum = Tile<T>::at(through, i * m + j) + Tile<T>::at(through, j * m + i);
          Tile<T>::put(Gb, i * m + j, Tile<T>::at(Gb, i * m + j) + sum);
        }
      }
      product_column(m, m, Along<T>{Tl, m}, Along<T>{qb, 0}, ToAlong<T>{work, 0});
      Tile<T>::copy(work, m, qb);
    }
  }

  FASTLIN_HD void clear_sums() { Tile<T>::zero(sums, 2 * P.layers * P.H * m * m); }

  // Adds the lanes' sums of trial r to those of the block, dA and dC [R, L - 1, H, m, m].
  FASTLIN_HD void add_sums(std::int64_t r, double* block_dA, double* block_dC) const {
    const std::int64_t count = P.layers * P.H * m * m;
    if (out.dA != nullptr) Tile<T>::add_sums(sums, count, block_dA + r * count);
    if (out.dC != nullptr) Tile<T>::add_sums(sums + count * N, count, block_dC + r * count);
  }

 private:
  FASTLIN_HD const T* parameter(const T* all, std::int64_t r, std::int64_t l, std::int64_t h) const {
    return all + ((r * P.layers + l) * P.H + h) * m * m;
  }
  FASTLIN_HD T* dA(std::int64_t l, std::int64_t h) { return sums + (l * P.H + h) * square; }
  FASTLIN_HD T* dC(std::int64_t l, std::int64_t h) { return sums + ((P.layers + l) * P.H + h) * square; }

  const Problem<T>& P;
  const Results<T>& out;
  const std::int64_t m, square;
  const T scale;
  T *G = nullptr, *T_ = nullptr, *GT = nullptr, *AG = nullptr, *q = nullptr, *Tb = nullptr, *work = nullptr,
    *through = nullptr, *sums = nullptr;
};
