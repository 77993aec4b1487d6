// A step's queries, and which keys of the paged KV pool each of them attends to.
//
// Keys are numbered from 0: the committed tokens by position, then a node's own ancestors and itself.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace specray {

constexpr int KEYS = 64;  // that are computed together: blocks from key 0 of a query on

// The requests of a step. Request r has `query_lens[r]` consecutive queries.
struct Requests {
  int32_t count;
  int32_t slots_width, mask_rows, mask_columns;
  const int32_t* query_lens;
  const int32_t* kv_lens;     // the queries' own keys included
  const int32_t* tree_sizes;  // [count, 2]: the last n queries are nodes over the last m keys
  const int64_t* kv_slots;    // [count, slots_width]
  const uint8_t* tree_mask;   // [count, mask_rows, mask_columns]: node i sees key j of the tree

  const int64_t* slots_of(int request) const { return kv_slots + int64_t(request) * slots_width; }
};

// The keys of one query: `shared` committed ones, then `others`, which are numbers of keys of the request.
struct Keys {
  int shared;
  std::vector<int> others;

  int count() const { return shared + int(others.size()); }
  // Keys before it are outside a window; 0: none is.
  int first(int window) const { return window > 0 ? std::max(0, count() - window) : 0; }
};

inline Keys keys_of(const Requests& requests, int request, int query) {
  const int num_queries = requests.query_lens[request], kv_len = requests.kv_lens[request];
  const int nodes = requests.tree_sizes[2 * request], tree_keys = requests.tree_sizes[2 * request + 1];
  const int node = query - (num_queries - nodes);
  Keys keys{kv_len - num_queries + query + 1, {}};
  if (node >= 0 && nodes > 0) {
    keys.shared = kv_len - tree_keys;
    const uint8_t* sees = requests.tree_mask + (int64_t(request) * requests.mask_rows + node) * requests.mask_columns;
    for (int key = 0; key < tree_keys; ++key)
      if (sees[key]) keys.others.push_back(keys.shared + key);
  }
  return keys;
}

// Queries `begin` to `end` of one request, which share its keys.
struct QueryTile {
  int request, begin, end;
  int64_t first;  // the request's first query among all

  int count() const { return end - begin; }
};

// A step's queries in tiles, and what each query sees: the same in all layers.
struct Queries {
  std::vector<QueryTile> tiles;
  std::vector<Keys> keys;  // of all queries; empty where they are in no tile

  // Tiles have up to `most` queries. `read_lens` [requests]: only so many of each request's last ones are in them; null: all.
  Queries(const Requests& requests, int most, const int32_t* read_lens) {
    int64_t first = 0;
    for (int request = 0; request < requests.count; ++request) {
      const int end = requests.query_lens[request], count = read_lens ? read_lens[request] : end, start = end - count;
      const int least = requests.count == 1 ? 2 : 1;  // something for each member
      const int parts = std::max(least, (count + most - 1) / most), size = std::max(1, (count + parts - 1) / parts);
      for (int begin = start; begin < end; begin += size)
        tiles.push_back({request, begin, std::min(begin + size, end), first});
      keys.resize(first + end);
      for (int query = start; query < end; ++query) keys[first + query] = keys_of(requests, request, query);
      first += end;
    }
  }

  const Keys* keys_of_tile(const QueryTile& tile) const { return keys.data() + tile.first + tile.begin; }
};

}  // namespace specray
