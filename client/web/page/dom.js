// Small helpers for the elements of the page. Texts are never parsed as HTML.

export const by = (id) => document.getElementById(id);

// An element with properties (or attributes, where the name has a dash), classes and children.
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "scope") element.setAttribute(name, value);
    else if (name === "style") Object.assign(element.style, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function replace(parent, ...children) {
  parent.replaceChildren(...children.flat().filter(Boolean));
}

// A box that scrolls; its edges fade where there is more.
export function scrolling(className, ...children) {
  const box = el("div", { className: `scroll ${className}` }, ...children);
  const mark = () => {
    box.classList.toggle("has-right", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
    box.classList.toggle("has-below", box.scrollTop + box.clientHeight < box.scrollHeight - 1);
  };
  box.addEventListener("scroll", mark);
  new ResizeObserver(mark).observe(box);
  return box;
}

// A token without the space before it; what cannot be seen has a sign.
export const visible = (token) => token.trim() || (token === "" ? "∅" : token.includes("\n") ? "⏎" : "␣");

// The same, with a sign for the space, where tokens are told apart by it.
export const spaced = (token) =>
  token.startsWith(" ") && token.trim() ? `·${token.trim()}` : visible(token);

export const milliseconds = (seconds) =>
  seconds === undefined || Number.isNaN(seconds)
    ? "–"
    : seconds < 0.0995
      ? `${(1000 * seconds).toFixed(1)} ms`
      : seconds < 0.9995
        ? `${(1000 * seconds).toFixed(0)} ms`
        : `${seconds.toFixed(2)} s`;
