// Keys that act wherever the focus is, unless it is in a field or a dialog is open.

/** Let T and the button change the theme, / go to the search, and further keys do what `actions` says. */
function listenToKeys(actions = {}) {
  const change = () => theme.choose(theme.name === "dark" ? "light" : "dark");
  const all = { t: change, "/": () => { byId("search").focus(); byId("search").select(); }, ...actions };
  byId("theme").addEventListener("click", change);
  document.addEventListener("keydown", (event) => {
    const action = all[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, textarea") || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    action();
  });
}
