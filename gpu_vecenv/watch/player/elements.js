// What the scripts of all pages use: elements, numbers as text, colours.

const $ = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// A number with 4 significant digits.
function formatNumber(value) {
  if (!Number.isFinite(value)) return "–";
  return (Object.is(value, -0) ? 0 : value).toLocaleString("en", { maximumSignificantDigits: 4 }).replace("-", "−");
}

const cssColour = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

const isDark = matchMedia("(prefers-color-scheme: dark)");
const isStill = matchMedia("(prefers-reduced-motion: reduce)");

// Relative luminance, of WCAG 2: https://www.w3.org/TR/WCAG22/#dfn-relative-luminance
function luminance(colour) {
  const [red, green, blue] = colour.map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

// The nearest colour with a contrast of at least 3 : 1 to the panel.
function legibleColour(colour) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue("--panel").trim(); // #rrggbb
  const panel = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const towards = luminance(panel) < 0.2 ? 255 : 0;
  for (let share = 0; share < 1; share += 0.05) {
    const mixed = colour.map((part) => Math.round(part + (towards - part) * share));
    const [low, high] = [luminance(mixed), luminance(panel)].sort((one, other) => one - other);
    if ((high + 0.05) / (low + 0.05) >= 3) return cssColour(mixed);
  }
  return cssColour([towards, towards, towards]);
}
