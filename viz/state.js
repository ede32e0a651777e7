// The page's state in the URL's fragment: a link to the page restores it.

const STATE_DELAY = 200; // ms after the last change
const NO_STATE = Object.freeze({});

/** Return the fragment as an object of texts; unknown keys stay, for newer pages. */
function readState() {
  try {
    return Object.fromEntries(new URLSearchParams(window.location.hash.slice(1)));
  } catch {
    return {};
  }
}

/** Return the finite numbers of a list such as "1,2". */
const stateNumbers = (text) => (text || "").split(",").filter(Boolean).map(Number).filter(Number.isFinite);

/** Put texts into the fragment, without those that are empty; the browser's history does not grow. */
function writeState(values) {
  const kept = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const text = kept.length ? `#${new URLSearchParams(kept)}` : " "; // a fragment cannot be removed, only emptied
  if (text.trim() === window.location.hash) return;
  window.history.replaceState(null, "", text.trim() || window.location.href.split("#")[0]);
}

/** Keeps a view and the fragment in sync. A view has `state()`, which returns texts, and `restore(texts)`. */
class StateKeeper {
  constructor(view) {
    this.view = view;
    window.addEventListener("hashchange", () => view.restore(readState())); // a link was pasted into this page
  }

  /** Note that something has changed. */
  changed() {
    clearTimeout(this.later);
    this.later = setTimeout(() => writeState(this.view.state()), STATE_DELAY);
  }
}
