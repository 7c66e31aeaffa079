// Numbers and elements. Text only ever goes through textContent.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name === "class") made.className = value;
    else if (value !== undefined && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const absent = "–";

export function count(value) {
  if (value === null || value === undefined) return absent;
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return Math.round(value).toLocaleString("en");
}

export function rate(value) {
  if (value === null || value === undefined) return absent;
  return value < 100 ? String(Number(value.toFixed(1))) : count(value);
}

export function seconds(value) {
  if (value === null || value === undefined) return absent;
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.1 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${(value / 60).toFixed(0)} min`;
}

export function share(value) {
  return value === null || value === undefined ? absent : `${Math.round(value * 100)}%`;
}

export function number(value) {
  if (value === null || value === undefined) return absent;
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB");
}
