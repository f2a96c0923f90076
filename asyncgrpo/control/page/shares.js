// Where the time of the learner and of the generators goes, as two bars.

import {colourOf, wordsOf} from "/colours.js";
import {byId, make, percent} from "/dom.js";
import {generatorSeconds, learnerSeconds, summed} from "/events.js";

export function drawShares(events) {
  byId("shares").replaceChildren(
    ...bar("learner", summed(events.recent.map(learnerSeconds)), ["train", "publish", "checkpoint", "eval", "other", "wait_data"]),
    ...bar("generators", summed(events.recent.map(generatorSeconds)), ["generate", "reward", "weights", "idle"]),
  );
}

function bar(name, seconds, order) {
  const all = Object.values(seconds).reduce((sum, value) => sum + value, 0);
  if (!all) return [];
  const parts = order.filter((activity) => seconds[activity] > 0.0005 * all);
  const inside = parts.map((activity) => make("span", {
    style: {width: `${(100 * seconds[activity]) / all}%`, background: colourOf(activity)},
    title: `${wordsOf(activity)} ${percent(seconds[activity] / all)}`,
  }));
  const legend = parts.map((activity) => make("span", {},
    make("i", {style: {background: colourOf(activity)}}), `${wordsOf(activity)} ${percent(seconds[activity] / all)}`));
  return [make("div", {class: "share"}, make("span", {}, name), make("div", {class: "bar"}, ...inside),
    make("div", {class: "legend"}, ...legend))];
}
