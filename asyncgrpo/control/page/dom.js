// Elements and numbers. Whatever a run says becomes text, never markup: completions come from a model, and nobody vouches for it.

export const byId = (id) => document.getElementById(id);

/** An element: `make("p", {class: "dim", onclick: f}, "text", child)`. Children that are null are left out. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(element.style, value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export function say(id, text) {
  byId(id).textContent = text;
}

export function figure(value, digits = 3) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(1);
  return Math.abs(value) < 1000 ? `${+value.toFixed(digits)}` : thousands(value);
}

export function thousands(value) {
  if (value == null) return "–";
  for (const unit of ["", "k", "M"]) {
    if (Math.abs(value) < 999.5) return `${+value.toPrecision(3)}${unit}`;
    value /= 1000;
  }
  return `${+value.toPrecision(3)}G`;
}

export const percent = (share) => `${Math.round(100 * share)} %`;

export function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return `${hours}:${String(minutes).padStart(2, "0")}:${String(rest).padStart(2, "0")}`;
}

export const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
