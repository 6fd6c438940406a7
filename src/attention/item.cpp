// SPDX-License-Identifier: Apache-2.0
// One item of a call: its queries over tiles of keys, with the softmax carried along.
#include "attention/item.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/rows.h"

namespace kvstride::attend {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

/// One run of an item.
class Run {
 public:
  Run(const Problem& problem, const Item& item, const Sizes& sizes, Workspace& space, const State& state,
      Findings* findings)
      : problem_(problem),
        item_(item),
        sizes_(sizes),
        space_(space),
        state_(state),
        findings_(findings),
        sequence_(problem.sequences[static_cast<std::size_t>(item.sequence)]),
        math_(cpu::attention_math()),
        keys_(cpu::key_loops(problem.keys.row_dtype())),
        values_(cpu::value_loops(problem.values.row_dtype())),
        products_(problem.products),
        tiled_(problem.tiled(sequence_)),
        dim_(problem.keys.dim()),
        value_dim_(problem.values.dim()) {}

  void operator()() {
    load_query();
    const std::int64_t rows = item_.all_rows();
    std::fill_n(state_.tops, rows, kLowest);
    std::fill_n(state_.sums, rows, 0.0F);
    std::fill_n(state_.values, rows * sizes_.value_step, 0.0F);
    const std::int64_t size = tile_keys(problem_, item_);
    for (tile_ = item_.first_key / size * size; tile_ < item_.end_key; tile_ += size) {
      tile_size_ = size;
      first_ = std::max(tile_, item_.first_key);
      end_ = std::min(tile_ + size, item_.end_key);
      run_tile();
    }
  }

 private:
  /// Rows of heads [first_head, end_head), of each those from first_row to end_row.
  struct Rows {
    std::int64_t first_head;
    std::int64_t end_head;
    std::int64_t first_row;
    std::int64_t end_row;
  };

  void load_query() {
    const TokenTensor& q = problem_.batch.query;
    const std::int64_t item = item_size(q.dtype);
    // A token's heads lie side by side.
    for (std::int64_t r = 0; r < item_.rows; ++r) {
      const std::int64_t token = sequence_.query + item_.first_row + r;
      for (std::int64_t h = 0; h < item_.all_heads(); ++h) {
        const std::int64_t head = item_.kv_head * problem_.group + item_.first_head + h;
        load_row(row_of(h, r), q.data + (token * q.strides[0] + head * q.strides[1]) * item, q);
      }
    }
  }

  void load_row(std::int64_t row, const std::byte* from, const TokenTensor& q) {
    float* to = space_.query + row * sizes_.query_step;
    const bool narrow = !item_.direct && products_.narrow();
    if (narrow && q.strides[2] == 1) {
      // It is what the products take.
      const std::int64_t bytes = dim_ * products_.item;
      std::memcpy(narrow_row(row), from, static_cast<std::size_t>(bytes));
      std::memset(narrow_row(row) + bytes, 0, static_cast<std::size_t>(sizes_.query_step * products_.item - bytes));
      return;
    }
    read_row(to, from, q.dtype, q.strides[2], dim_, reinterpret_cast<std::byte*>(space_.row));
    std::fill(to + dim_, to + sizes_.query_step, 0.0F);
    if (narrow) math_.narrow(narrow_row(row), to, sizes_.query_step);
    if (item_.direct) keys_.order(to, dim_);
  }

  /// Rows of the query as the products take them.
  std::byte* narrow_row(std::int64_t row) const {
    return space_.narrow_query + row * sizes_.query_step * products_.item;
  }
  const std::byte* factor_row(std::int64_t row) const {
    if (products_.narrow()) return narrow_row(row);
    return reinterpret_cast<const std::byte*>(space_.query + row * sizes_.query_step);
  }

  std::int64_t row_of(std::int64_t head, std::int64_t row) const { return head * item_.rows + row; }
  std::int64_t first_of(std::int64_t row) const {
    return std::max(first_, first_key(problem_, sequence_, item_.first_row + row));
  }
  std::int64_t end_of(std::int64_t row) const { return std::min(end_, end_key(sequence_, item_.first_row + row)); }

  void run_tile() {
    const std::int64_t count = end_ - first_;
    problem_.keys.rows(problem_.batch.blocks, item_.sequence, first_, count, item_.kv_head, space_.key_rows.data(),
                       space_.key_staging.data());
    values_ready_ = false;
    if (item_.direct) return run_rows({0, item_.all_heads(), 0, item_.rows});
    products_.pack_keys(space_.key_panels, space_.key_rows.data(), count, dim_);
    const std::int64_t step = tiled_ ? item_.rows : products_.rows;
    for (std::int64_t h = 0; h < item_.heads; ++h) {
      for (std::int64_t r = 0; r < item_.rows; r += step) run_rows({h, h + 1, r, std::min(r + step, item_.rows)});
    }
  }

  void run_rows(const Rows& rows) {
    make_scores(rows);
    for (std::int64_t h = rows.first_head; h < rows.end_head; ++h) finish_scores(rows, h);
    Rows kept{rows.first_head, rows.first_head, rows.first_row, rows.end_row};
    const auto use_kept = [&] {
      if (kept.first_head < kept.end_head) use_values(rows, kept);
    };
    for (std::int64_t h = rows.first_head; h < rows.end_head; ++h) {
      if (tiled_ && skips(rows, h)) {
        use_kept();
        kept.first_head = kept.end_head = h + 1;
      } else {
        kept.end_head = h + 1;
      }
    }
    use_kept();
  }

  /// Where the scores of a row lie; the first of them is the tile's first key.
  float* scores_of(const Rows& rows, std::int64_t head, std::int64_t row) const {
    const std::int64_t index = (head - rows.first_head) * (rows.end_row - rows.first_row) + row - rows.first_row;
    return space_.scores + index * sizes_.score_step;
  }

  void make_scores(const Rows& rows) {
    const std::int64_t count = end_ - first_;
    float* to = scores_of(rows, rows.first_head, rows.first_row) + (first_ - tile_);
    const std::int64_t first_row = row_of(rows.first_head, rows.first_row);
    const std::int64_t num = (rows.end_head - rows.first_head) * (rows.end_row - rows.first_row);
    if (item_.direct) {
      const float* query = space_.query + first_row * sizes_.query_step;
      keys_.scores(to, sizes_.score_step, query, sizes_.query_step, num / item_.kv_heads, space_.key_rows.data(), count,
                   dim_, {item_.kv_heads, 0, problem_.keys.head_step()});
      return;
    }
    const std::int64_t depth = products_.padded_depth(dim_);
    for (std::int64_t r = 0; r < num; r += products_.rows) {
      const std::int64_t some = std::min(products_.rows, num - r);
      const std::int64_t seen = end_of(rows.first_row + r + some - 1) - first_;
      if (seen <= 0) continue;
      products_.multiply(to + r * sizes_.score_step, sizes_.score_step, factor_row(first_row + r), sizes_.query_step,
                         some, space_.key_panels, depth, depth * products_.panel,
                         (seen + products_.panel - 1) / products_.panel);
    }
  }

  /// What scores must be multiplied by.
  float scale_of(std::int64_t head) const {
    return problem_.scale * problem_.key_scale(item_.kv_head + head / item_.heads) * (item_.direct ? keys_.unit : 1.0F);
  }

  /// Whether that is done with them before the softmax: where cap or N:M must see them as they are, and where the
  /// largest score does not become the largest.
  bool scales_first(std::int64_t head) const {
    return problem_.options.soft_cap > 0.0F || sequence_.keep || !(scale_of(head) > 0.0F);
  }

  /// Mask, soft cap, N:M; the largest of each row.
  void finish_scores(const Rows& rows, std::int64_t head) {
    const std::int64_t width = score_width(rows);
    for (std::int64_t r = rows.first_row; r < rows.end_row; ++r) {
      float* scores = scores_of(rows, head, r);
      const std::int64_t first = std::min(first_of(r), end_) - tile_;
      const std::int64_t end = std::max(end_of(r) - tile_, first);
      float& largest = space_.largest[row_of(head, r)];
      largest = math_.finish(scores, first, end, width, scale_of(head), problem_.options.soft_cap, scales_first(head));
      if (sequence_.keep) largest = keep(scores, r, first, end, width);
    }
  }

  /// Scores of a tile that one of some rows may see, padded.
  std::int64_t score_width(const Rows& rows) const {
    return cpu::padded(std::max(end_of(rows.end_row - 1), first_) - tile_);
  }

  float keep(float* scores, std::int64_t row, std::int64_t first, std::int64_t end, std::int64_t width) {
    const KeepNofM& rule = *problem_.keep;
    const std::int64_t position = sequence_.offset() + item_.first_row + row;
    std::memcpy(space_.row, scores, static_cast<std::size_t>(width) * sizeof(float));
    math_.keep(scores, width, rule.n, rule.m);
    const auto restore = [&](std::int64_t from, std::int64_t to) {
      from = std::max(from - tile_, first);
      to = std::min(to - tile_, end);
      if (from < to) std::copy(space_.row + from, space_.row + to, scores + from);
    };
    restore(0, rule.sink_tokens);
    restore(position - rule.recent + 1, position + 1);
    return math_.finish(scores, first, end, width, 1.0F, 0.0F, false);
  }

  /// The rule of skip-softmax for a tile of one head: every row's largest score is below its running maximum by more
  /// than log λ. A row that has none yet is never below.
  bool skips(const Rows& rows, std::int64_t head) {
    float gap = kLowest;
    for (std::int64_t r = rows.first_row; r < rows.end_row; ++r) {
      const float top = state_.tops[row_of(head, r)];
      const float largest = space_.largest[row_of(head, r)];
      const float below = largest - top;
      gap = std::max(gap, top == kLowest || std::isnan(below) ? -kLowest : below);
    }
    bool skipped = false;
    if (!problem_.calibrating()) skipped = gap < sequence_.log_lambda;
    if (findings_ == nullptr) return skipped;
    ++findings_->counters.total;
    findings_->counters.skipped += skipped ? 1 : 0;
    for (std::size_t i = 0; i < findings_->skipped_at.size(); ++i) {
      findings_->skipped_at[i] += gap < std::log(problem_.options.thresholds[i]) ? 1 : 0;
    }
    if (problem_.options.decisions != nullptr) {
      findings_->decisions.push_back({item_.sequence, item_.kv_head * problem_.group + item_.first_head + head,
                                      item_.first_row / problem_.options.tile_rows, tile_ / tile_size_, skipped});
    }
    return skipped;
  }

  /// Softmax of the scores and their part of the values, for the heads that were kept.
  void use_values(const Rows& rows, const Rows& kept) {
    if (!values_ready_) prepare_values();
    for (std::int64_t h = kept.first_head; h < kept.end_head; ++h) {
      const float scale = scales_first(h) ? 1.0F : scale_of(h);
      for (std::int64_t r = rows.first_row; r < rows.end_row; ++r) weigh(rows, h, r, scale);
    }
    if (item_.direct) return add_direct(rows, kept);
    for (std::int64_t r = rows.first_row; r < rows.end_row; r += products_.rows) {
      add_packed(rows, kept.first_head, r, std::min(r + products_.rows, rows.end_row));
    }
  }

  void weigh(const Rows& rows, std::int64_t head, std::int64_t r, float scale) {
    const std::int64_t row = row_of(head, r);
    float& top = state_.tops[row];
    const float largest = space_.largest[row];
    if (largest > top) {
      if (top != kLowest) {
        const float factor = std::exp(top - largest);
        math_.multiply_row(state_.values + row * sizes_.value_step, sizes_.value_step, factor);
        state_.sums[row] *= factor;
      }
      top = largest;
    }
    const float max = top == kLowest ? 0.0F : top;
    float* scores = scores_of(rows, head, r);
    if (!narrow_weights()) {
      state_.sums[row] += math_.exponentiate(scores, score_width(rows), scale, max);
      return;
    }
    const std::int64_t at = weights_at(rows, r);
    const std::int64_t count = std::max(end_of(rows.end_row - 1), first_) - first_;
    state_.sums[row] += math_.weigh(space_.narrow_weights + at, scores + (first_ - tile_), count,
                                    products_.padded_depth(count), scale, max);
  }

  bool narrow_weights() const { return !item_.direct && products_.narrow() && all_finite_; }
  /// Where the weights of a row of the one head at work lie.
  std::int64_t weights_at(const Rows& rows, std::int64_t row) const {
    return (row - rows.first_row) * sizes_.weight_step * products_.item;
  }

  void prepare_values() {
    const std::int64_t count = end_ - first_;
    problem_.values.rows(problem_.batch.blocks, item_.sequence, first_, count, item_.kv_head, space_.value_rows.data(),
                         space_.value_staging.data());
    if (!item_.direct) {
      all_finite_ = products_.pack_values(space_.value_panels, space_.value_rows.data(), count, value_dim_);
      if (!all_finite_) values_.pack(space_.wide_values, space_.value_rows.data(), count, value_dim_);
    }
    values_ready_ = true;
  }

  /// All rows at once where they see the same keys: a key that a row does not see must not reach it, not even × 0.
  void add_direct(const Rows& rows, const Rows& kept) {
    const std::int64_t step = problem_.values.head_step();
    const auto add = [&](std::int64_t head, std::int64_t row, std::int64_t num, std::int64_t kv_heads) {
      const std::int64_t first = first_of(row);
      const std::int64_t end = num == 1 ? end_of(row) : end_;
      if (first >= end) return;
      const std::int64_t all = num * kv_heads * sizes_.value_step;
      std::fill_n(space_.fresh, all, 0.0F);
      values_.add(space_.fresh, sizes_.value_step, scores_of(rows, head, row) + (first - tile_), sizes_.score_step, num,
                  space_.value_rows.data() + (first - first_), end - first, value_dim_,
                  {kv_heads, head / item_.heads * step, step});
      add_fresh(state_.values + row_of(head, row) * sizes_.value_step, all);
    };
    const bool alike = item_.rows == 1 || (first_of(item_.rows - 1) == first_ && end_of(0) == end_);
    if (!alike) {
      for (std::int64_t h = kept.first_head; h < kept.end_head; ++h) {
        for (std::int64_t r = 0; r < item_.rows; ++r) add(h, r, 1, 1);
      }
    } else if (kept.end_head - kept.first_head == item_.all_heads()) {
      add(0, 0, item_.heads * item_.rows, item_.kv_heads);
    } else {
      // Runs of heads of one KV head.
      for (std::int64_t h = kept.first_head; h < kept.end_head;) {
        const std::int64_t end = std::min(kept.end_head, (h / item_.heads + 1) * item_.heads);
        add(h, 0, (end - h) * item_.rows, 1);
        h = end;
      }
    }
  }

  void add_fresh(float* to, std::int64_t count) const { math_.add(to, space_.fresh, count); }

  void add_packed(const Rows& rows, std::int64_t head, std::int64_t first_row, std::int64_t end_row) {
    if (!all_finite_) return add_one_by_one(rows, head, first_row, end_row);
    const std::int64_t num = end_row - first_row;
    // Weights of keys that a row does not see are 0.
    const std::int64_t first = (first_of(first_row) - first_) / products_.unit * products_.unit;
    const std::int64_t end = end_of(end_row - 1) - first_;
    if (first >= end) return;
    const std::int64_t depth = products_.padded_depth(end - first);
    const std::byte* weights = nullptr;
    std::int64_t step = sizes_.score_step;
    if (products_.narrow()) {
      step = sizes_.weight_step;
      const std::int64_t at = weights_at(rows, first_row) + first * products_.item;
      weights = space_.narrow_weights + at;
    } else {
      weights = reinterpret_cast<const std::byte*>(scores_of(rows, head, first_row) + (first_ - tile_) + first);
    }
    const std::int64_t panel_step = products_.padded_depth(end_ - first_) * products_.panel;
    products_.multiply(space_.fresh, sizes_.value_step, weights, step, num,
                       space_.value_panels + first * products_.panel * products_.item, depth, panel_step,
                       (value_dim_ + products_.panel - 1) / products_.panel);
    add_fresh(state_.values + row_of(head, first_row) * sizes_.value_step, num * sizes_.value_step);
  }

  /// What a row does not see, or N:M dropped, is as if it were not there, and not a weight of 0.
  void add_one_by_one(const Rows& rows, std::int64_t head, std::int64_t first_row, std::int64_t end_row) {
    const std::int64_t panel_step = (end_ - first_) * math_.panel;
    const std::int64_t panels = (value_dim_ + math_.panel - 1) / math_.panel;
    for (std::int64_t r = first_row; r < end_row; ++r) {
      const float* weights = scores_of(rows, head, r) - tile_;
      for (std::int64_t key = first_of(r); key < end_of(r); ++key) {
        if (sequence_.keep && weights[key] == 0.0F) continue;
        math_.multiply(space_.fresh, sizes_.value_step, reinterpret_cast<const std::byte*>(weights + key), 1, 1,
                       space_.wide_values + (key - first_) * math_.panel * static_cast<std::int64_t>(sizeof(float)), 1,
                       panel_step, panels);
        add_fresh(state_.values + row_of(head, r) * sizes_.value_step, sizes_.value_step);
      }
    }
  }

  const Problem& problem_;
  const Item& item_;
  const Sizes& sizes_;
  Workspace& space_;
  const State& state_;
  Findings* findings_;
  const Sequence& sequence_;
  const cpu::AttentionMath& math_;
  const cpu::KeyLoops keys_;
  const cpu::ValueLoops values_;
  const cpu::Products& products_;
  const bool tiled_;
  const std::int64_t dim_;
  const std::int64_t value_dim_;
  std::int64_t tile_ = 0;  // first key of the tile, of which [first_, end_) belong to the item
  std::int64_t tile_size_ = 0;
  std::int64_t first_ = 0;
  std::int64_t end_ = 0;
  bool values_ready_ = false;
  bool all_finite_ = true;
};

/// Calls one function now and another at the end of its life; either may be null.
class Bracket {
 public:
  Bracket(void (*begin)(), void (*end)()) : end_(begin == nullptr ? nullptr : end) {
    if (begin != nullptr) begin();
  }
  ~Bracket() {
    if (end_ != nullptr) end_();
  }
  Bracket(const Bracket&) = delete;
  Bracket& operator=(const Bracket&) = delete;

 private:
  void (*end_)();
};

}  // namespace

Workspace::Workspace(const Problem& problem, const Sizes& sizes) {
  const cpu::Products& products = problem.products;
  const std::int64_t spare = sizes.packs ? products.spare : 0;
  std::vector<std::pair<float**, std::int64_t>> wanted{
      {&query, sizes.rows * sizes.query_step},
      {&scores, (sizes.score_rows + spare) * sizes.score_step},
      {&row, std::max({sizes.query_step, sizes.value_step, sizes.score_step})},
      {&largest, sizes.rows},
      {&fresh, (sizes.score_rows + spare) * sizes.value_step},
      {&state.values, sizes.rows * sizes.value_step},
      {&state.tops, sizes.rows},
      {&state.sums, sizes.rows},
  };
  std::vector<std::pair<std::byte**, std::int64_t>> packed{
      {&key_panels, cpu::padded(sizes.keys) * products.padded_depth(problem.keys.dim()) * products.item},
      {&value_panels, products.padded_depth(sizes.keys) * sizes.value_step * products.item},
      {&wide_values, sizes.keys * sizes.value_step * static_cast<std::int64_t>(sizeof(float))},
      {&narrow_query, (sizes.rows + spare) * sizes.query_step * products.item},
      {&narrow_weights, (sizes.score_rows + spare) * sizes.weight_step * products.item},
  };
  // The last two are of products that narrow.
  packed.resize(!sizes.packs ? 0 : !products.narrow() ? 3 : 5);
  constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
  std::int64_t total = 0;
  for (const auto& [pointer, count] : wanted) total += cpu::padded(count);
  for (const auto& [pointer, bytes] : packed) total += cpu::padded(bytes / kFloat + 1);
  memory = hwy::AllocateAligned<float>(static_cast<std::size_t>(std::max<std::int64_t>(total, 1)));
  if (!memory) throw std::bad_alloc();
  float* next = memory.get();
  for (auto& [pointer, count] : wanted) {
    *pointer = next;
    next += cpu::padded(count);
  }
  for (auto& [pointer, bytes] : packed) {
    *pointer = reinterpret_cast<std::byte*>(next);
    next += cpu::padded(bytes / kFloat + 1);
  }
  key_rows.resize(static_cast<std::size_t>(sizes.keys));
  value_rows.resize(static_cast<std::size_t>(sizes.keys));
  key_staging.resize(static_cast<std::size_t>(sizes.keys * problem.keys.staged_bytes()));
  value_staging.resize(static_cast<std::size_t>(sizes.keys * problem.values.staged_bytes()));
}

void run(const Problem& problem, const Item& item, const Sizes& sizes, Workspace& space, const State& into,
         Findings* findings) {
  const State& state = item.shared ? into : space.state;
  const Bracket bracket(item.direct ? nullptr : problem.products.begin, problem.products.end);
  Run(problem, item, sizes, space, state, findings)();
  if (!item.shared) write_out(problem, item, sizes, state, space.row);
}

void write_out(const Problem& problem, const Item& item, const Sizes& sizes, const State& state, float* row) {
  const AttentionOutput& output = problem.output;
  const Sequence& sequence = problem.sequences[static_cast<std::size_t>(item.sequence)];
  const DType dtype = problem.batch.query.dtype;
  const std::int64_t item_bytes = item_size(dtype);
  const std::int64_t dim = problem.values.dim();
  const cpu::ValueLoops loops = cpu::value_loops(problem.values.row_dtype());
  for (std::int64_t r = 0; r < item.rows; ++r) {
    const std::int64_t token = sequence.query + item.first_row + r;
    for (std::int64_t h = 0; h < item.all_heads(); ++h) {
      const std::int64_t head = item.kv_head * problem.group + item.first_head + h;
      const std::int64_t index = h * item.rows + r;
      float top = state.tops[index];
      float sum = state.sums[index];
      float factor = problem.value_scale(item.kv_head + h / item.heads) * (item.direct ? loops.unit : 1.0F);
      if (!problem.options.sinks.empty()) {
        const float sink = problem.options.sinks[static_cast<std::size_t>(head)];
        const float both = std::max(top, sink);
        if (both != kLowest) {
          const float shrink = std::exp(top - both);
          sum = sum * shrink + std::exp(sink - both);
          factor *= shrink;
          top = both;
        }
      }
      float* values = state.values + index * sizes.value_step;
      cpu::attention_math().multiply_row(values, sizes.value_step, sum == 0.0F ? 0.0F : factor / sum);
      if (item.direct) loops.order(values, dim);
      std::byte* to = output.out + (token * output.strides[0] + head * output.strides[1]) * item_bytes;
      write_row(to, values, dtype, output.strides[2], dim, reinterpret_cast<std::byte*>(row));
      if (output.lse == nullptr) continue;
      const double lse = sum == 0.0F ? double{kLowest} : double{top} + std::log(double{sum});
      constexpr double kLog2E = 1.4426950408889634;
      output.lse[token * problem.heads + head] = static_cast<float>(problem.options.lse_log2 ? lse * kLog2E : lse);
    }
  }
}

void merge(const State& state, const State& more, std::int64_t rows, std::int64_t step) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float top = std::max(state.tops[r], more.tops[r]);
    // Of two without a key, the sums are 0, or NaN.
    const float mine = state.tops[r] == top ? 1.0F : std::exp(state.tops[r] - top);
    const float theirs = more.tops[r] == top ? 1.0F : std::exp(more.tops[r] - top);
    float* to = state.values + r * step;
    const float* from = more.values + r * step;
    for (std::int64_t i = 0; i < step; ++i) to[i] = to[i] * mine + from[i] * theirs;
    state.sums[r] = state.sums[r] * mine + more.sums[r] * theirs;
    state.tops[r] = top;
  }
}

}  // namespace kvstride::attend
