// As much of Markdown as runbooks use, as elements: headings, lists, tables, code, paragraphs.

import {make} from "/dom.js";

export function blocks(text) {
  return text.split(/(```[\s\S]*?```)/).flatMap((part) =>
    part.startsWith("```") ? [make("pre", {}, part.replace(/^```.*\n|```$/g, ""))] : part.split(/\n\s*\n/).filter((p) => p.trim()).map(block));
}

function block(text) {
  const heading = /^(#+) +(.*)/.exec(text.trim());
  if (heading) return make(`h${Math.min(3, heading[1].length + 1)}`, {}, ...inline(heading[2]));
  const item = /^\s*(?:[-*]|\d+\.) +/;
  if (item.test(text)) {
    const items = text.trim().split(/\n(?=\s*(?:[-*]|\d+\.) +)/);
    return make(/^\s*\d/.test(text) ? "ol" : "ul", {}, ...items.map((each) => make("li", {}, ...inline(each.replace(item, "")))));
  }
  if (text.trim().startsWith("|")) return table(text.trim().split("\n"));
  return make("p", {}, ...inline(text));
}

function table([head, , ...rows]) {
  const cells = (name, row) => row.split("|").slice(1, -1).map((cell) => make(name, {}, ...inline(cell.trim())));
  return make("table", {}, make("tr", {}, ...cells("th", head)), ...rows.map((row) => make("tr", {}, ...cells("td", row))));
}

function inline(text) {
  const plain = text.replace(/\[([^\]]*)\]\([^)]*\)/g, "$1").replace(/\*\*?([^*\n]+)\*\*?/g, "$1");
  return plain.split(/(`[^`]*`)/).map((part) => (part.startsWith("`") ? make("code", {}, part.slice(1, -1)) : part));
}
