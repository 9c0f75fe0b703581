// Changes every number that a rank reads from other ranks, one at a time, and runs dispatch and combine on the CPU
// engine: tests/test_peer_data.py. All ranks are engines of this process, which takes their steps in turn, so nothing
// ever waits and a number changes at a known time. Built with AddressSanitizer.
//
//   lying_rank SHAPE [EVERY FIRST]     only each EVERY-th case, from FIRST on; prints how many cases ended how
//
// Right ends of a case: an error that names the fault (BadPeerData, Refused, PeerLate), or results in which every row
// and sum that is not of the lying rank, nor relayed by it, is right to the bit. In a case with `plans`: check_plan
// refuses a plan in which any integer was changed.
#include <sys/mman.h>
#include <unistd.h>

#include <climits>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cpu/engine.h"

extern "C" void __sanitizer_set_death_callback(void (*callback)());

using namespace ep;
using namespace ep::cpu;

namespace {

constexpr int kLiar = 1;
constexpr double kTimeout = 0.01;
const std::string kAway = "away";

struct Shape {
  const char* name;
  int num_nodes, ranks_per_node;
  Layout layout;
  bool weights;  // topk_weights travel along
  bool masks;
  int spare_rows;  // of max_recv_rows; -1: as many as are received
  int away = -1;   // a rank that the others have masked, and that stays away
  int num_experts = 6, num_topk = 3, max_tokens = 6, hidden = 4;
};

const Shape kShapes[] = {
    {"expert", 1, 2, Layout::kExpert, true, false, -1},        {"rank", 1, 3, Layout::kRank, true, false, -1},
    {"spare", 1, 3, Layout::kExpert, false, false, 5},         {"decode", 1, 2, Layout::kDecode, false, false, -1},
    {"masks", 1, 3, Layout::kDecode, false, true, -1},         {"nodes", 2, 2, Layout::kExpert, true, false, -1},
    {"decode nodes", 2, 1, Layout::kDecode, false, false, -1}, {"away", 1, 3, Layout::kDecode, false, true, -1, 2},
};

// One change: at a step, a word of what is read there becomes another.
struct Change {
  int step = -1;  // none
  size_t word = 0;
  int kind = 0;
};
constexpr int kKinds = 7;

int32_t changed(int32_t value, int kind) {
  const auto n = static_cast<uint32_t>(value);
  const uint32_t values[kKinds] = {n + 1, n - 1, 0, UINT32_MAX, INT_MAX, 0x80000000u, n + 64};
  return static_cast<int32_t>(values[kind]);
}

// The words that a change may hit at a step: names, and where they are.
struct Words {
  std::vector<std::pair<std::string, int32_t*>> all;

  template <class T>
  void add(const std::string& name, T* first, size_t count = 1) {
    const size_t words = count * sizeof(T) / sizeof(int32_t);
    for (size_t i = 0; i < words; ++i)
      all.emplace_back(name + "+" + std::to_string(i), reinterpret_cast<int32_t*>(first) + i);
  }
  void add(const std::string& name, Flag* first, size_t count = 1) {
    const size_t words = offsetof(Flag, raised_ns) / sizeof(int32_t) + 4;  // the rest is padding
    for (size_t i = 0; i < count; ++i)
      add(name + "[" + std::to_string(i) + "]", reinterpret_cast<int32_t*>(first + i), words);
  }
};

std::string g_case = "the first run";

struct Outputs {
  std::vector<float> rows, weights, sums, sum_weights;
  std::vector<int64_t> topk_idx;
};

struct Rank {
  std::unique_ptr<Engine> engine;
  char* memory = nullptr;  // another mapping of its shared memory
  size_t bytes = 0;
  Region region;
  std::vector<int64_t> topk_idx;
  std::vector<float> x, topk_weights;
  std::vector<int32_t> plan;
  Outputs out;
  std::vector<Outputs> after;  // each operation
  std::string error;           // its kind
};

struct Run {
  const Shape& shape;
  const Change& change;
  Config config;
  std::vector<Rank> ranks;
  int step = 0;
  std::vector<size_t> words_of;                // of all steps
  std::vector<std::vector<char>> kept_counts;  // [num_nodes] those in the liar's inbox, as their sources wrote them

  Run(const Shape& shape, const Change& change) : shape(shape), change(change) {
    config.num_nodes = shape.num_nodes;
    config.ranks_per_node = shape.ranks_per_node;
    config.num_experts = shape.num_experts / config.num_ranks() * config.num_ranks();
    if (config.num_experts == 0) config.num_experts = config.num_ranks();
    config.num_topk = shape.num_topk;
    config.max_tokens = shape.max_tokens;
    config.hidden = shape.hidden;
    config.dtype = DType::kFloat32;
    config.masks = shape.masks;
    config.spin_us = 0;
    for (int r = 0; r < config.num_ranks(); ++r) config.rank_at.push_back(r);
    std::vector<int> fds, pids(config.ranks_per_node, getpid());
    for (int r = 0; r < config.num_ranks(); ++r) {
      Rank& rank = ranks.emplace_back();
      config.rank = r;
      config.node = r / config.ranks_per_node;
      config.local_rank = r % config.ranks_per_node;
      rank.engine = std::make_unique<Engine>(config, 7);
      fds.push_back(rank.engine->fd());
      Cursor size;
      carve_region(size, config);
      rank.bytes = size.size();
      rank.memory =
          static_cast<char*>(mmap(nullptr, rank.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, rank.engine->fd(), 0));
      Cursor c(rank.memory);
      rank.region = carve_region(c, config);
      route_of(r, rank);
    }
    for (int r = 0; r < config.num_ranks(); ++r) {
      const int first = r / config.ranks_per_node * config.ranks_per_node;
      ranks[r].engine->attach(pids, {fds.begin() + first, fds.begin() + first + config.ranks_per_node});
    }
    for (Rank& rank : ranks) rank.engine->close_fd();
    for (int r = 0; r < config.num_ranks() && shape.away >= 0; ++r) {
      if (r == shape.away)
        ranks[r].error = kAway;
      else
        ranks[r].engine->mask(shape.away);
    }
  }

  ~Run() {
    for (Rank& rank : ranks) {
      munmap(rank.memory, rank.bytes);
      rank.engine->close();
    }
  }

  int num_tokens(int r) const { return shape.max_tokens - r % 2; }

  // Choose experts, and make rows whose numbers say whose they are.
  void route_of(int r, Rank& rank) {
    const int topk = config.num_topk;
    for (int t = 0; t < num_tokens(r); ++t) {
      for (int k = 0; k < topk; ++k) {
        const int expert = (t * 5 + r * 3 + k * 2) % config.num_experts;
        bool is_new = (t + k + r) % 5 != 0;
        for (int j = 0; j < k; ++j) is_new = is_new && rank.topk_idx[t * topk + j] != expert;
        rank.topk_idx.push_back(is_new ? expert : -1);
        rank.topk_weights.push_back(0.5f + 0.125f * ((t + k) % 4));
      }
      for (int h = 0; h < config.hidden; ++h) rank.x.push_back(static_cast<float>(r * 100 + t + 1) + 0.125f * h);
    }
  }

  // Run a step of every rank that has not failed yet.
  void each(const std::function<void(int, Rank&)>& body) {
    for (int r = 0; r < config.num_ranks(); ++r) {
      Rank& rank = ranks[r];
      if (!rank.error.empty()) continue;
      try {
        body(r, rank);
        continue;
      } catch (const BadPeerData& bad) {
        rank.error = "bad data";
      } catch (const Refused& refused) {
        rank.error = "refused";
      } catch (const PeerLate& late) {
        rank.error = "late";
      } catch (const MaskedByPeer& masked) {
        rank.error = "masked";
      }
      rank.engine->abort(kLeft);
    }
  }

  // Apply the change, if this is its step.
  void point(const std::function<void(Words&)>& collect) {
    Words words;
    collect(words);
    words_of.push_back(words.all.size());
    if (step++ != change.step) return;
    auto& [name, word] = words.all.at(change.word);
    int32_t value;
    std::memcpy(&value, word, sizeof(value));
    const int32_t other = changed(value, change.kind);
    g_case = std::string(shape.name) + ", step " + std::to_string(change.step) + ", " + name + ": " +
             std::to_string(value) + " became " + std::to_string(other);
    std::memcpy(word, &other, sizeof(other));
  }

  void add_counts(Words& words, const std::string& name, const Counts& counts) {
    words.add(name + "start", counts.start);
    words.add(name + "node_tokens", counts.node_tokens, config.num_nodes);
    words.add(name + "rank_tokens", counts.rank_tokens, config.num_ranks());
    words.add(name + "expert_tokens", counts.expert_tokens, config.num_experts);
  }

  void add_lists(Words& words, const std::string& name, char* memory, const Counts& counts, int node) {
    Cursor c(memory);
    const Lists lists = carve_lists(c, config, counts, node);
    words.add(name + "slot_begin", lists.slot_begin, counts.node_tokens[node] + 1);
    for (int local = 0; local < config.ranks_per_node; ++local) {
      const Lists::OfRank& of = lists.of_rank[local];
      const std::string prefix = name + "to " + std::to_string(local) + " ";
      words.add(prefix + "payload_row", of.payload_row, of.num_items);
      words.add(prefix + "slot", of.slot, of.num_items);
      words.add(prefix + "copy_begin", of.copy_begin, of.num_items + 1);
      words.add(prefix + "expert", of.expert, of.num_copies);
      words.add(prefix + "k", of.k, of.num_copies);
    }
  }

  // Collect all that others read in the liar's memory but rows. full: counts and lists too, which this operation wrote.
  void add_region(Words& words, bool full) {
    const Region& region = ranks[kLiar].region;
    const int node = kLiar / config.ranks_per_node;
    words.add("aborted", region.aborted);
    words.add("masked", region.masked, config.masks ? config.ranks_per_node : 0);
    words.add("called", region.called);
    words.add("calls", region.calls, 2);
    words.add("counted", region.counted, config.num_nodes);
    words.add("listed", region.listed, config.num_nodes);
    words.add("staged", region.staged, config.num_nodes);
    words.add("pushed", region.pushed, config.num_nodes);
    words.add("consumed", region.consumed);
    for (int m = 0; m < config.num_nodes && full; ++m) {
      const Counts counts = region.inbox[m].counts;
      add_counts(words, "inbox " + std::to_string(m) + " ", counts);
      add_lists(words, "inbox " + std::to_string(m) + " ", region.inbox[m].lists, true_counts(m), node);
      if (m == node) continue;
      Cursor c(region.inbox[m].payload);
      words.add("inbox " + std::to_string(m) + " payload", carve_calls(c));
    }
  }

  Counts true_counts(int m) {
    Cursor c(kept_counts.at(m).data());
    return carve_counts(c, config);
  }

  void keep_counts() {
    for (const Inbox& inbox : ranks[kLiar].region.inbox) {
      Cursor size;
      carve_counts(size, config);
      const char* from = reinterpret_cast<const char*>(inbox.counts.start);
      kept_counts.emplace_back(from, from + size.size());
    }
  }

  // Pass messages between nodes: from every rank to its rail peers. The liar's may change on the way.
  void exchange(const std::function<Span(Rank&, int)>& outgoing, const std::function<Span(Rank&, int)>& incoming,
                const std::function<void(Rank&, int)>& arrived, const std::function<void(Words&, char*, int)>& name) {
    if (config.num_nodes == 1) return;
    struct Message {
      int from, to;
      std::vector<char> bytes;
    };
    std::vector<Message> messages;
    each([&](int r, Rank& rank) {
      for (int m = 0; m < config.num_nodes; ++m) {
        if (m == r / config.ranks_per_node) continue;
        const Span span = outgoing(rank, m);
        messages.push_back(
            {r, m * config.ranks_per_node + r % config.ranks_per_node, {span.data, span.data + span.size}});
      }
    });
    point([&](Words& words) {
      for (Message& message : messages)
        if (message.from == kLiar) name(words, message.bytes.data(), message.to / config.ranks_per_node);
    });
    each([&](int r, Rank& rank) {
      int awaited = config.num_nodes - 1;
      for (const Message& message : messages) awaited -= message.to == r;
      if (awaited > 0) throw PeerLate("a message", {}, {});  // its sender has failed
      for (const Message& message : messages) {
        if (message.to != r) continue;
        const int from = message.from / config.ranks_per_node;
        const Span span = incoming(rank, from);
        if (span.size < message.bytes.size()) {
          std::printf("%s: a message of %zu bytes for %zu\n", g_case.c_str(), message.bytes.size(), span.size);
          std::exit(1);  // gloo would end the process
        }
        std::memcpy(span.data, message.bytes.data(), message.bytes.size());
        arrived(rank, from);
      }
    });
  }

  void dispatch(bool cached) {
    const bool decodes = shape.layout == Layout::kDecode;
    const auto arguments = [&](int r, Rank& rank) {
      DispatchArgs args;
      args.rows = {{reinterpret_cast<const char*>(rank.x.data()), config.row_bytes()}};
      args.topk_weights = shape.weights ? rank.topk_weights.data() : nullptr;
      args.num_tokens = num_tokens(r);
      return args;
    };
    const std::vector<size_t> row_bytes{config.row_bytes()};
    each([&](int r, Rank& rank) {
      rank.engine->begin(kTimeout, 1);
      if (cached)
        rank.engine->reuse(Call::kDispatch, rank.plan.data(), row_bytes, shape.weights);
      else
        rank.engine->route({rank.topk_idx.data(), num_tokens(r), shape.layout, 2, rows_given(r)}, arguments(r, rank));
    });
    if (!cached) {
      exchange([](Rank& rank, int) { return rank.engine->own_counts(); },
               [](Rank& rank, int m) { return rank.engine->incoming_counts(m); },
               [](Rank& rank, int m) { rank.engine->counts_arrived(m); },
               [&](Words& words, char* message, int) {
                 Cursor c(message);
                 add_counts(words, "message of counts ", carve_counts(c, config));
               });
      keep_counts();
      point([&](Words& words) { add_region(words, true); });
    } else {
      point([&](Words& words) { add_region(words, false); });
    }
    each([&](int r, Rank& rank) { rank.engine->stage(arguments(r, rank)); });
    if (!cached) {
      each([&](int, Rank& rank) {
        const OutputSizes sizes = rank.engine->count();
        rank.plan.assign(sizes.plan_elements, -1);
        rank.engine->start_plan(rank.plan.data(), rank.plan.size());
        resize(rank.out, sizes.num_rows);
      });
      const int own = kLiar / config.ranks_per_node;
      exchange([](Rank& rank, int m) { return rank.engine->outgoing_lists(m); },
               [](Rank& rank, int m) { return rank.engine->incoming_lists(m); },
               [](Rank& rank, int m) { rank.engine->lists_arrived(m); },
               [&](Words& words, char* message, int to) {
                 add_lists(words, "message of lists ", message, true_counts(own), to);
               });
    }
    exchange([&](Rank& rank, int m) { return rank.engine->pack_payload(m, arguments(&rank - ranks.data(), rank)); },
             [](Rank& rank, int m) { return rank.engine->incoming_payload(m); },
             [](Rank& rank, int m) { rank.engine->payload_arrived(m); },
             [&](Words& words, char* message, int) {
               Cursor c(message);
               words.add("message of rows", carve_calls(c));
             });
    point([&](Words& words) { add_region(words, !cached); });
    if (!cached) each([&](int, Rank& rank) { rank.engine->finish_plan(); });
    each([&](int r, Rank& rank) {
      PullArgs args;
      args.out = {reinterpret_cast<char*>(rank.out.rows.data())};
      args.out_weights = shape.weights ? rank.out.weights.data() : nullptr;
      args.out_topk_idx = shape.layout == Layout::kRank ? rank.out.topk_idx.data() : nullptr;
      if (decodes) std::fill(rank.out.rows.begin(), rank.out.rows.end(), 0.0f);
      rank.engine->prepare_output(args);
      const int node = r / config.ranks_per_node;
      rank.engine->pull(node, args);
      for (int m = 0; m < config.num_nodes; ++m)
        if (m != node) rank.engine->pull(m, args);
      rank.engine->agree();
    });
    each([](int, Rank& rank) { rank.engine->finish(); });
  }

  int rows_given(int r) const {
    if (shape.spare_rows < 0) return -1;
    return config.num_ranks() * shape.max_tokens * config.num_topk + shape.spare_rows + r;
  }

  void resize(Outputs& out, int64_t num_rows) {
    const int per_row = shape.layout == Layout::kRank ? config.num_topk : 1;
    out.rows.assign(num_rows * config.hidden, -1);
    out.weights.assign(num_rows * per_row, -1);
    out.topk_idx.assign(num_rows * config.num_topk, -2);
  }

  void combine() {
    const bool weighted = shape.layout == Layout::kDecode;
    const auto arguments = [&](Rank& rank) {
      CombineArgs args;
      args.y = reinterpret_cast<const char*>(rank.out.rows.data());
      args.topk_weights = shape.weights ? rank.out.weights.data() : nullptr;
      args.out = reinterpret_cast<char*>(rank.out.sums.data());
      args.out_weights = shape.weights ? rank.out.sum_weights.data() : nullptr;
      return args;
    };
    const auto weights_of = [&](int r, Rank& rank) {
      DispatchArgs args;
      args.topk_weights = rank.topk_weights.data();
      args.num_tokens = num_tokens(r);
      return args;
    };
    each([&](int r, Rank& rank) {
      rank.out.sums.assign(num_tokens(r) * config.hidden, -1);
      rank.out.sum_weights.assign(num_tokens(r) * config.num_topk, -1);
      rank.engine->begin(kTimeout, 1);
      rank.engine->reuse(weighted ? Call::kWeightedCombine : Call::kCombine, rank.plan.data(), {config.row_bytes()},
                         shape.weights);
    });
    point([&](Words& words) { add_region(words, false); });
    if (weighted) {
      each([&](int r, Rank& rank) { rank.engine->stage(weights_of(r, rank)); });
      each([](int, Rank& rank) { rank.engine->compare_on_node("weights"); });
      exchange([&](Rank& rank, int m) { return rank.engine->pack_payload(m, weights_of(&rank - ranks.data(), rank)); },
               [](Rank& rank, int m) { return rank.engine->incoming_payload(m); },
               [](Rank& rank, int m) { rank.engine->payload_arrived(m); },
               [&](Words& words, char* message, int) {
                 Cursor c(message);
                 words.add("message of weights", carve_calls(c));
               });
    }
    each([&](int r, Rank& rank) {
      for (int m = 0; m < config.num_nodes; ++m)
        if (m != r / config.ranks_per_node) rank.engine->push(m, arguments(rank));
    });
    exchange([&](Rank& rank, int m) { return rank.engine->reduce(m, shape.weights); },
             [](Rank& rank, int m) { return rank.engine->incoming_sums(m); }, [](Rank&, int) {},
             [&](Words& words, char* message, int) {
               Cursor c(message);
               words.add("message of sums", carve_calls(c));
             });
    point([&](Words& words) { add_region(words, false); });
    each([&](int r, Rank& rank) { rank.engine->push(r / config.ranks_per_node, arguments(rank)); });
    each([&](int, Rank& rank) { rank.engine->sum(arguments(rank)); });
    each([](int, Rank& rank) { rank.engine->finish(); });
  }

  void run() {
    const auto keep = [](int, Rank& rank) { rank.after.push_back(rank.out); };
    for (const bool cached : {false, true}) {
      dispatch(cached);
      each(keep);
      combine();
      each(keep);
    }
  }

  // The liar, and the ranks whose data it relays.
  bool is_liars(int r) const { return r % config.ranks_per_node == kLiar % config.ranks_per_node; }
  int source_of(const Outputs& out, size_t row) const { return static_cast<int>(out.rows[row * config.hidden]) / 100; }

  // Compare with the right results what no change of the liar's numbers may touch.
  void compare(const Run& right) const {
    for (int r = 0; r < config.num_ranks(); ++r) {
      const Rank& rank = ranks[r];
      if (!rank.error.empty()) continue;
      if (rank.engine->masked() != right.ranks[r].engine->masked()) return;  // then rows and sums are missing
      for (size_t i = 0; i < rank.after.size(); ++i) {
        const Outputs &mine = rank.after[i], &theirs = right.ranks[r].after[i];
        if (mine.rows.size() != theirs.rows.size()) fail(r, i, "the number of rows");
        const size_t num_rows = mine.rows.size() / config.hidden;
        for (size_t row = 0; row < num_rows; ++row) {
          if (is_liars(source_of(theirs, row))) continue;
          same(r, i, "a row", mine.rows, theirs.rows, row, num_rows);
          same(r, i, "a weight", mine.weights, theirs.weights, row, num_rows);
          same(r, i, "an expert", mine.topk_idx, theirs.topk_idx, row, num_rows);
        }
        if (is_liars(r)) continue;
        same(r, i, "a sum", mine.sums, theirs.sums, 0, 1);
        same(r, i, "a weight of a sum", mine.sum_weights, theirs.sum_weights, 0, 1);
      }
    }
  }

  template <class T>
  void same(int r, size_t operation, const char* what, const std::vector<T>& mine, const std::vector<T>& theirs,
            size_t row, size_t num_rows) const {
    const size_t per_row = mine.size() / num_rows;
    if (per_row && std::memcmp(&mine[row * per_row], &theirs[row * per_row], per_row * sizeof(T)) != 0)
      fail(r, operation, what);
  }

  void fail(int r, size_t operation, const char* what) const {
    std::printf("%s: on rank %d operation %zu has %s wrong, and no error\n", g_case.c_str(), r, operation, what);
    std::exit(1);
  }

  // Change every integer of every plan. Return how many there are.
  int change_plans() {
    int num = 0;
    for (int r = 0; r < config.num_ranks(); ++r) {
      if (r == shape.away) continue;
      std::vector<int32_t>& plan = ranks[r].plan;
      const int64_t num_rows = ranks[r].out.rows.size() / config.hidden;
      const auto is_refused = [&] {
        try {
          ranks[r].engine->check_plan(plan.data(), plan.size(), num_tokens(r), num_rows);
          return false;
        } catch (const std::invalid_argument&) {
          return true;
        }
      };
      if (is_refused()) fail(r, 0, "a sound plan refused");
      for (size_t word = 0; word < plan.size(); ++word) {
        for (int kind = 0; kind < kKinds; ++kind, ++num) {
          const int32_t value = plan[word];
          plan[word] = changed(value, kind);
          if (plan[word] != value && !is_refused()) fail(r, word, "a changed plan");
          plan[word] = value;
        }
      }
    }
    return num;
  }
};

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argv[1];
  const int every = argc > 2 ? std::atoi(argv[2]) : 1, first = argc > 3 ? std::atoi(argv[3]) : 0;
  __sanitizer_set_death_callback([] { std::fprintf(stderr, "case: %s\n", g_case.c_str()); });
  const Shape* shape = nullptr;
  for (const Shape& one : kShapes)
    if (name == one.name) shape = &one;
  if (!shape) return 2;
  const Change none;
  Run right(*shape, none);
  right.run();
  for (const Rank& rank : right.ranks) {
    if (rank.error.empty() || rank.error == kAway) continue;
    std::printf("%s: %s without any change\n", shape->name, rank.error.c_str());
    return 1;
  }
  std::map<std::string, int> ends;
  int number = 0;
  for (size_t step = 0; step < right.words_of.size(); ++step) {
    for (size_t word = 0; word < right.words_of[step]; ++word) {
      for (int kind = 0; kind < kKinds; ++kind) {
        if (number++ % every != first) continue;
        const Change change{static_cast<int>(step), word, kind};
        Run run(*shape, change);
        run.run();
        run.compare(right);
        // Count a case by the error that says most.
        std::set<std::string> errors;
        for (const Rank& rank : run.ranks) errors.insert(rank.error);
        for (const char* error : {"bad data", "refused", "masked", "late", ""})
          if (errors.count(error)) {
            ++ends[*error ? error : "right"];
            break;
          }
      }
    }
  }
  for (const auto& [end, count] : ends) std::printf("%s: %d\n", end.c_str(), count);
  std::printf("changed plans: %d\n", right.change_plans());
  return 0;
}
