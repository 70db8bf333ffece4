// What the page calls the options of a request.
export const LABELS = {
  beam_size: "Beams",
  length_penalty: "Length penalty",
  temperature: "Temperature",
  top_k: "Top k (empty: all)",
  seed: "Seed",
  num_hypotheses: "Answers",
  max_new_tokens: "Tokens at most",
  long_source: "Several sentences",
  timestamps: "Times",
};

// What a model counts of its sources, by their forms; of texts it is tokens.
const UNITS = {
  sentences: "sentences",
  picture: "places",
  clip: "frames",
  features: "annotations",
  sound: "positions",
};

export function unitOf(model) {
  const form = Object.values(model.sources).find((one) => one in UNITS);
  return UNITS[form] ?? "source tokens";
}
