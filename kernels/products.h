// What is computed with a map of quantized weights, whose kinds are in int8.h and int4.h. It knows nothing of ONNX Runtime.
//
// Letters: I inputs of a map, O outputs.

// Writes the outputs of a map.
template <class Map> struct Product {
  const Map *map;
  typename Map::Levels levels;
  float *outputs; // (N, O)
  size_t num_rows;

  size_t num_items() const { return map->num_panels(); }
  size_t scratch() const { return map->num_outputs % COLUMNS ? num_rows * COLUMNS : 0; }

  void run(size_t begin, size_t end, float *scratch) const {
    const size_t O = map->num_outputs;
    for (size_t panel = begin; panel < end; panel++) {
      const size_t place = panel * COLUMNS;
      const bool is_whole = place + COLUMNS <= O;
      map->multiply(map->bias.data(), levels, 0, num_rows, panel, is_whole ? outputs + place : scratch, is_whole ? O : COLUMNS);
      for (size_t row = 0; row < num_rows && !is_whole; row++)
        memcpy(outputs + row * O + place, scratch + row * COLUMNS, (O - place) * sizeof(float));
    }
  }
};

// Instead of writing logits, keeps of each row and panel the largest one, and the sum of the powers relative to it.
template <class Map> struct Summary {
  const Map *map;
  const float *bias; // (O,), and minus infinity up to whole panels
  typename Map::Levels levels;
  float *largest; // (N, panels)
  float *powers;  // (N, panels); null if they are not needed
  size_t num_rows;

  size_t num_items() const { return map->num_panels(); }
  bool is_found() const { return map->finds_largest(); }
  bool are_read() const { return powers || !is_found(); } // the logits
  size_t scratch() const { return are_read() ? num_rows * COLUMNS : 0; }

  void run(size_t begin, size_t end, float *scratch) const {
    for (size_t panel = begin; panel < end; panel++) {
      map->multiply(bias, levels, 0, num_rows, panel, are_read() ? scratch : nullptr, COLUMNS,
                    is_found() ? largest + panel : nullptr);
      for (size_t row = 0; row < num_rows && are_read(); row++) {
        Vector logits[COLUMNS / 8];
        for (size_t v = 0; v < COLUMNS / 8; v++) logits[v] = load(scratch + row * COLUMNS + 8 * v);
        const size_t place = row * map->num_panels() + panel;
        if (!is_found())
          largest[place] = ::largest(larger(larger(logits[0], logits[1]), larger(logits[2], logits[3])));
        if (powers) powers[place] = sum_of_powers(logits, largest[place]);
      }
    }
  }
};

// Finds the largest logits of each row by its summary, the lowest id among equals: the panels that may contain one are
// multiplied again.
template <class Map> struct Choice {
  Summary<Map> summary;
  size_t num_candidates;
  int64_t *token_ids;       // (N, candidates)
  float *log_probabilities; // (N, candidates); null if they are not needed
  double *normalizers;      // (N,): what is subtracted from the logits of a row; null without powers

  size_t num_items() const { return summary.num_rows; }
  size_t scratch() const { return num_candidates; }

  void run(size_t begin, size_t end, float *scratch) const {
    const size_t num_panels = summary.map->num_panels();
    for (size_t row = begin; row < end; row++) {
      const float *largest = summary.largest + row * num_panels;
      float *best = log_probabilities ? log_probabilities + row * num_candidates : scratch;
      const auto search = [&](size_t panel, const auto &add) {
        float logits[COLUMNS];
        summary.map->multiply(summary.bias, summary.levels, row, 1, panel, logits, COLUMNS);
        for (size_t i = 0; i < COLUMNS; i++) add(logits[i], panel * COLUMNS + i);
      };
      find_largest(largest, num_panels, num_candidates, best, token_ids + row * num_candidates, search);
      if (normalizers)
        normalizers[row] = normalize(best, num_candidates, largest, summary.powers + row * num_panels, num_panels);
    }
  }
};

// Looks up the log-probabilities of some tokens: the panels that contain them are multiplied again.
template <class Map> struct Places {
  const Summary<Map> *summary;
  const double *normalizers; // (N,)
  const int64_t *places;     // (P, 2): rows and token ids
  const size_t *order;       // (P,): places by their tokens, so that a panel that many rows need is read once
  float *found;              // (P,)
  size_t num_places;

  size_t num_items() const { return num_places; }
  size_t scratch() const { return 0; }

  void run(size_t begin, size_t end, float *) const {
    for (const size_t *place = order + begin; place < order + end; place++) {
      const size_t row = places[2 * *place], token_id = places[2 * *place + 1];
      float logits[COLUMNS];
      summary->map->multiply(summary->bias, summary->levels, row, 1, token_id / COLUMNS, logits, COLUMNS);
      found[*place] = static_cast<float>(logits[token_id % COLUMNS] - normalizers[row]);
    }
  }
};
