// The head of a layer, for the sequences or the trials in the lanes:
//   yhat = scale attended + rho q . h     r = dloss/dyhat     g = scale r
// `attended` is the sum of a . c over the attention heads.
template <class T>
struct Head {
  using V = Vec<T>;

  const V scale, rho;
  const bool skips, stores, has_targets, has_slopes;

  FASTLIN_HD Head(const Problem<T>& P, const Results<T>& out)
      : scale(V::set(static_cast<T>(P.scale))),
        rho(V::set(static_cast<T>(P.last_skip))),
        skips(P.h != nullptr),
        stores(out.yhat != nullptr),
        has_targets(P.has_targets()),
        has_slopes(P.gy != nullptr) {}

  // Returns r, and adds the squared errors to `squares`. `lanes` knows where the numbers of the lanes are:
  // skipped() is q . h, target() and coefficient() belong to the squared error, slope() is r where it is
  // given, and store(yhat) stores the predictions.
  template <class Lanes>
  FASTLIN_HD FASTLIN_INLINE V error(V attended, const Lanes& lanes, V& squares) const {
    V yhat = scale * attended;
    if (skips) yhat = fma(rho, lanes.skipped(), yhat);
    if (stores) lanes.store(yhat);
    if (!has_targets) return has_slopes ? lanes.slope() : V::zero();
    const V difference = yhat - lanes.target();
    squares = fma(difference, difference, squares);
    return (difference + difference) * lanes.coefficient();
  }
};
