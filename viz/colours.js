// Colours of both themes, as CSS and as the 32-bit values of canvas pixels.

const LIGHT = {
  page: "#f5f6f8", card: "#ffffff", text: "#1c2430", quiet: "#5b6676", line: "#dfe3ea", accent: "#2563eb",
  peak: "#c62f25", reserved: "#6b7688", unused: "#e3e7ee", pending: "#9aa4b5", other: "#b3bbc8",
};
const DARK = {
  page: "#11151c", card: "#1a2029", text: "#e6eaf0", quiet: "#9aa7ba", line: "#2c3542", accent: "#6ea0ff",
  peak: "#ff7b6e", reserved: "#98a5ba", unused: "#2a323f", pending: "#5d6a7e", other: "#566173",
};

// Twenty colours that are distinct in both themes; red is reserved for the peak and failures, grey for the rest.
const PALETTE = [
  "#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#4fb3bf", "#e7a1b0", "#d8b13a", "#9c755f", "#5b8ff9", "#c85fa0",
  "#8cc04f", "#7a5fc0", "#d9773f", "#2f8f83", "#8aa7d6", "#a58b2c", "#c08fdb", "#3f9fd0", "#b8745a", "#6f8f3f",
];
const paletteColour = (index) => PALETTE[index % PALETTE.length];

/** Return a CSS colour "#rrggbb" as the value of a pixel. */
function pixel(colour) {
  const value = parseInt(colour.slice(1), 16);
  return (0xff000000 | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}
/** Return a pixel as a CSS colour. */
const css = (value) => `#${[0, 8, 16].map((shift) => ((value >> shift) & 255).toString(16).padStart(2, "0")).join("")}`;

/** Mix two pixels. */
function mix(one, other, share) {
  let result = 0xff000000;
  for (const shift of [0, 8, 16]) {
    const a = (one >> shift) & 0xff;
    const b = (other >> shift) & 0xff;
    result |= Math.round(a + (b - a) * share) << shift;
  }
  return result >>> 0;
}

/** The theme in use: the system's, unless the user chose another. `theme.pixels` has every colour as a pixel. */
const theme = {
  listeners: [],
  choose(name) {
    document.documentElement.dataset.theme = name;
    Object.assign(this, name === "dark" ? DARK : LIGHT, { name });
    this.pixels = Object.fromEntries(Object.entries(LIGHT).map(([key]) => [key, pixel(this[key])]));
    for (const [key, value] of Object.entries(LIGHT)) document.documentElement.style.setProperty(`--${key}`, this[key] || value);
    for (const listener of this.listeners) listener();
  },
};
const systemTheme = window.matchMedia("(prefers-color-scheme: dark)");
theme.choose(systemTheme.matches ? "dark" : "light");
systemTheme.addEventListener("change", () => {
  if (!theme.onScreen) theme.choose(systemTheme.matches ? "dark" : "light");
});
// Paper is light. `theme.onScreen` is the theme to return to, while the page is printed.
window.addEventListener("beforeprint", () => {
  theme.onScreen = theme.name;
  theme.choose("light");
});
window.addEventListener("afterprint", () => {
  const { onScreen } = theme;
  theme.onScreen = null;
  theme.choose(onScreen);
});

// One colour for every four doublings, from 512 B to 32 GiB; sizes in between get mixed colours.
const SIZE_COLOURS = ["#9ccc65", "#26a69a", "#29b6f6", "#5c6bc0", "#ab47bc", "#ff8a65", "#fdd835"].map(pixel);

/** Return the pixel for a block of 2 ** `log2` bytes. */
function sizeColour(log2) {
  const at = Math.max(0, Math.min((log2 - 9) / 4, SIZE_COLOURS.length - 1.001));
  return mix(SIZE_COLOURS[Math.floor(at)], SIZE_COLOURS[Math.floor(at) + 1], at % 1);
}
