// The colours of activities, the same in curves and bars, as the style sheet has them for light and dark.

const NAMES = {
  train: "green", generate: "green",
  wait_data: "orange", idle: "orange",
  publish: "blue", weights: "blue",
  checkpoint: "purple", reward: "purple",
  eval: "red",
};
export const WORDS = {wait_data: "wait for data", reward: "only reward", weights: "take weights"};

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const colourOf = (activity) => colour(NAMES[activity] ?? "grey");
export const wordsOf = (activity) => WORDS[activity] ?? activity;
