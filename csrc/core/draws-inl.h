// The random numbers of V::size sequences, one sequence in each lane. core/philox.h has the layout.

template <class T>
class Lanes {
  using V = Vec<T>;
  using D = Vec<double>;
  using W = Vec<std::uint64_t>;
  using I = std::conditional_t<std::is_same<T, float>::value, Vec<std::uint32_t>, W>;
  static constexpr int N = V::size;
  static constexpr int kParts = N / D::size;  // vectors of doubles that hold V::size sequences

 public:
  FASTLIN_HD Lanes(std::uint64_t seed, std::uint32_t step, std::uint32_t stream)
      : philox_(seed, step, stream) {}

  // Selects sequences offset + sequences[i], i < V::size, in any order.
  FASTLIN_HD void seek(std::uint64_t offset, const std::int64_t* sequences) {
    const auto* from = reinterpret_cast<const std::uint64_t*>(sequences);
    for (int p = 0; p < kParts; ++p) {
      sequence_[p] = philox_.sequence(W::load(from + p * W::size) + W::set(offset));
    }
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

  // `count` uniforms, starting at a block.
  FASTLIN_HD void uniforms(std::uint32_t block, std::int64_t count, T* out) const {  // [count, V::size]
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

  // `count` normals, starting at a block. A pair uses two words even if only its first normal is wanted.
  FASTLIN_HD void normals(std::uint32_t block, std::int64_t count, T* out) const {  // [count, V::size]
    constexpr int kStep = 4 * kBlocks;
    I words[kStep];
    V x[kStep];
    for (; count >= kStep; count -= kStep, out += kStep * N, block += kBlocks) {
      words_of_blocks(block, words);
      normals_of_words(words, x);
      FASTLIN_UNROLL
      for (int j = 0; j < kStep; ++j) x[j].store(out + j * N);
    }
    if (count == 0) return;
    words_of_blocks(block, words);
    normals_of_words(words, x);
    FASTLIN_UNROLL
    for (int j = 0; j < kStep; ++j) {
      if (j < count) x[j].store(out + j * N);
    }
  }

  // The two normals of two words, in each lane.
  static void pair(const std::uint64_t* words0, const std::uint64_t* words1, T* first, T* second) {
    W w0[kParts], w1[kParts];
    for (int p = 0; p < kParts; ++p) {
      w0[p] = W::load(words0 + p * W::size);
      w1[p] = W::load(words1 + p * W::size);
    }
    I joined0, joined1;
    join(w0, joined0);
    join(w1, joined1);
    V x, y;
    normal_pairs(joined0, joined1, x, y);
    x.store(first);
    y.store(second);
  }

  // Chi variates of consecutive slots, [slots, V::size]; slot i has freedom(i) degrees of freedom, and is 0
  // if that is 0. Each variate is a long chain of dependent operations. Four vectors at a time take 70 %
  // (double) or 88 % (float) of the time of one slot after another (AVX-512).
  template <class F>
  FASTLIN_HD void chi(std::uint32_t block, F freedom, std::int64_t slots, T* out) const {
    constexpr int kSlots = kChains / kParts;
    for (std::int64_t i = 0; i < slots; i += kSlots) {
      std::int64_t slot_freedom[kSlots];
      FASTLIN_UNROLL
      for (int j = 0; j < kSlots; ++j) slot_freedom[j] = i + j < slots ? freedom(i + j) : 0;
      chi_slots(block + static_cast<std::uint32_t>(kBlocksPerChi * i), slot_freedom,
                static_cast<int>(std::min<std::int64_t>(kSlots, slots - i)), out + i * N);
    }
  }

 private:
  // Blocks and chi chains that are computed together: the products of one Philox block depend on each other
  // and would leave a CPU idle. A GPU runs other warps meanwhile.
  static constexpr bool kAlone = V::registers < 16;
  static constexpr int kBlocks = kAlone ? 1 : 2, kChains = kAlone ? kParts : 4;

  FASTLIN_HD FASTLIN_INLINE void draw(std::uint32_t block, W (&c)[kParts][4]) const {
    const PhiloxBlock shared = philox_.block(block);
    FASTLIN_UNROLL
    for (int p = 0; p < kParts; ++p) philox_.start(sequence_[p], shared, c[p]);
    philox_.finish(c);
  }

  // The first `count` of S slots.
  template <int S>
  FASTLIN_HD FASTLIN_INLINE void chi_slots(std::uint32_t block, const std::int64_t (&freedom)[S], int count,
                                           T* out) const {
    static_assert(S * kParts == kChains, "");
    using Ds = Parts<D, kChains>;
    using Ws = Parts<W, kChains>;
    Ds k, shape, scale;
    FASTLIN_UNROLL
    for (int i = 0; i < kChains; ++i) {
      const Freedom constants(freedom[i / kParts]);
      k.part[i] = D::set(constants.k);
      shape.part[i] = D::set(constants.shape);
      scale.part[i] = D::set(constants.scale);
    }
    Chi<Ds, Ws> chi(k, shape, scale);
    bool needs_block = true;
    for (std::uint32_t j = 0; needs_block && j < kBlocksPerChi; ++j) {
      W c[kChains][4];
      FASTLIN_UNROLL
      for (int i = 0; i < kChains; ++i) {
        const std::uint32_t slot = block + static_cast<std::uint32_t>(i / kParts * kBlocksPerChi);
        philox_.start(sequence_[i % kParts], philox_.block(slot + j), c[i]);
      }
      philox_.finish(c);
      Ws words[4];
      FASTLIN_UNROLL
      for (int i = 0; i < 4 * kChains; ++i) words[i % 4].part[i / 4] = c[i / 4][i % 4];
      needs_block = chi.block(words);
    }
    FASTLIN_UNROLL
    for (int i = 0; i < kChains; ++i) {
      if (i < count * kParts) store_rounded(chi.value.part[i], out + i * D::size);
    }
  }

  // Words in the lanes that `normal_pairs` takes.
  FASTLIN_HD FASTLIN_INLINE static void join(const W (&parts)[kParts], Vec<std::uint32_t>& w) {
    w = words_of(parts);
  }
  FASTLIN_HD FASTLIN_INLINE static void join(const W (&parts)[kParts], W& w) { w = parts[0]; }

  FASTLIN_HD FASTLIN_INLINE void words_of_blocks(std::uint32_t block, I (&words)[4 * kBlocks]) const {
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

  // For one vector of pairs, or several as Parts.
  template <class Words, class Normals>
  FASTLIN_HD FASTLIN_INLINE static void normal_pairs(Words w0, Words w1, Normals& first, Normals& second) {
    if constexpr (std::is_same<T, float>::value) {
      box_muller(w0, w1, first, second);
    } else {
      fixed_box_muller(w0, w1, first, second);
    }
  }

  FASTLIN_HD FASTLIN_INLINE static void normals_of_words(const I (&words)[4 * kBlocks], V (&x)[4 * kBlocks]) {
    FASTLIN_UNROLL
    for (int i = 0; i < 4 * kBlocks; i += 4) {
      const Parts<I, 2> w0{words[i], words[i + 2]}, w1{words[i + 1], words[i + 3]};
      Parts<V, 2> first, second;
      normal_pairs(w0, w1, first, second);
      x[i] = first.part[0], x[i + 1] = second.part[0];
      x[i + 2] = first.part[1], x[i + 3] = second.part[1];
    }
  }

  Philox<W> philox_;
  PhiloxSequence<W> sequence_[kParts];
};
