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
