// The draws of V::size sequences, one in each lane. core/philox.h has the layout.

template <class T>
class Lanes {
  using V = Vec<T>;
  using D = Vec<double>;
  using W = Vec<std::uint64_t>;
  using I = std::conditional_t<std::is_same<T, float>::value, Vec<std::uint32_t>, W>;
  static constexpr int N = V::size;
  static constexpr int kParts = N / D::size;  // vectors of doubles for as many sequences

 public:
  Lanes(std::uint64_t seed, std::uint32_t step, std::uint32_t stream) : philox_(seed, step, stream) {}

  void at(const std::uint64_t* sequences) {  // [V::size], any
    for (int p = 0; p < kParts; ++p) sequence_[p] = philox_.sequence(W::load(sequences + p * W::size));
  }

  void words(std::uint32_t block, std::uint32_t* out) const {  // [4, V::size]
    W c[kParts][4];
    draw(block, c);
    for (int i = 0; i < 4; ++i) {
      for (int p = 0; p < kParts; ++p) {
        std::uint64_t lanes[W::size];
        c[p][i].store(lanes);
        for (int l = 0; l < W::size; ++l) out[i * N + p * W::size + l] = static_cast<std::uint32_t>(lanes[l]);
      }
    }
  }

  // Uniforms 0 .. count - 1 from a block on.
  void uniforms(std::uint32_t block, std::int64_t count, T* out) const {  // [count, V::size]
    for (std::int64_t i = 0; i < count; i += 4) {
      W c[kParts][4];
      draw(block++, c);
      for (int j = 0; j < 4 && i + j < count; ++j) {
        for (int p = 0; p < kParts; ++p) {
          store_rounded(uniform<D>(c[p][j]), out + (i + j) * N + p * D::size);
        }
      }
    }
  }

  // Normals 0 .. count - 1 from a block on. A pair takes two words even when one of it is left out. Words are
  // drawn one step ahead: rounds and polynomials then have nothing to wait for in each other.
  void normals(std::uint32_t block, std::int64_t count, T* out) const {  // [count, V::size]
    constexpr int kStep = 4 * kBlocks;
    if (count == 0) return;
    I words[kStep];
    V x[kStep];
    words_of_blocks(block, words);
    for (; count > kStep; count -= kStep, out += kStep * N) {
      block += kBlocks;
      I next[kStep];
      words_of_blocks(block, next);
      normals_of_words(words, x);
      FASTLIN_UNROLL
      for (int j = 0; j < kStep; ++j) {
        x[j].store(out + j * N);
        words[j] = next[j];
      }
    }
    normals_of_words(words, x);
    for (int j = 0; j < count; ++j) x[j].store(out + j * N);
  }

  // The two normals of given words.
  static void pair(const std::uint64_t* words0, const std::uint64_t* words1, T* first, T* second) {
    W w0[kParts], w1[kParts];
    for (int p = 0; p < kParts; ++p) {
      w0[p] = W::load(words0 + p * W::size);
      w1[p] = W::load(words1 + p * W::size);
    }
    I w[2];
    join(w0, w[0]);
    join(w1, w[1]);
    V x, y;
    normal_pair(w[0], w[1], x, y);
    x.store(first);
    y.store(second);
  }

  // A chi variate from the blocks that start there; 0 when it has no freedom.
  void chi(std::uint32_t block, std::int64_t freedom, T* out) const {  // [V::size]
    const Chi<D, W> chi(freedom);
    W c[kParts][4];
    draw(block, c);
    for (int p = 0; p < kParts; ++p) {
      D value = D::zero();
      if (freedom > 0) {
        Mask<double> waiting = Mask<double>::all();
        bool again = chi.block(c[p], waiting, value);
        for (std::uint32_t j = 1; again && j < kBlocksPerChi; ++j) {
          W next[1][4];
          philox_.start(sequence_[p], philox_.block(block + j), next[0]);
          philox_.finish(next);
          again = chi.block(next[0], waiting, value);
        }
      }
      store_rounded(value, out + p * D::size);
    }
  }

 private:
  // Doubles have two blocks under way, as many chains of products as the two parts of floats.
  static constexpr int kBlocks = std::is_same<T, double>::value ? 2 : 1;

  FASTLIN_INLINE void draw(std::uint32_t block, W (&c)[kParts][4]) const {
    const PhiloxBlock shared = philox_.block(block);
    FASTLIN_UNROLL
    for (int p = 0; p < kParts; ++p) philox_.start(sequence_[p], shared, c[p]);
    philox_.finish(c);
  }

  // Words as the normals take them.
  FASTLIN_INLINE static void join(const W (&parts)[kParts], Vec<std::uint32_t>& w) { w = words_of(parts); }
  FASTLIN_INLINE static void join(const W (&parts)[kParts], W& w) { w = parts[0]; }

  FASTLIN_INLINE void words_of_blocks(std::uint32_t block, I (&words)[4 * kBlocks]) const {
    W c[kBlocks * kParts][4];
    FASTLIN_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      const PhiloxBlock shared = philox_.block(block + static_cast<std::uint32_t>(b));
      FASTLIN_UNROLL
      for (int p = 0; p < kParts; ++p) philox_.start(sequence_[p], shared, c[b * kParts + p]);
    }
    philox_.finish(c);
    FASTLIN_UNROLL
    for (int i = 0; i < 4 * kBlocks; ++i) {
      W parts[kParts];
      FASTLIN_UNROLL
      for (int p = 0; p < kParts; ++p) parts[p] = c[i / 4 * kParts + p][i % 4];
      join(parts, words[i]);
    }
  }

  FASTLIN_INLINE static void normal_pair(Vec<std::uint32_t> w0, Vec<std::uint32_t> w1, Vec<float>& first,
                                         Vec<float>& second) {
    box_muller(w0, w1, first, second);
  }
  FASTLIN_INLINE static void normal_pair(W w0, W w1, Vec<double>& first, Vec<double>& second) {
    fixed_box_muller(w0, w1, first, second);
  }

  FASTLIN_INLINE static void normals_of_words(const I (&words)[4 * kBlocks], V (&x)[4 * kBlocks]) {
    FASTLIN_UNROLL
    for (int i = 0; i < 4 * kBlocks; i += 2) normal_pair(words[i], words[i + 1], x[i], x[i + 1]);
  }

  Philox<W> philox_;
  PhiloxSequence<W> sequence_[kParts];
};
