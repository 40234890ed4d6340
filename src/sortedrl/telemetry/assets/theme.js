// Light or dark: as the system wishes, or as the reader chose. It runs before the page is painted. It makes no requests.
"use strict";
const pageTheme = (() => {
  const KEY = "sortedrl-theme";
  const CHOICES = ["auto", "light", "dark"];
  const system = matchMedia("(prefers-color-scheme: dark)");
  const listeners = [];
  let chosen = "auto";
  let isPrinting = false;
  try {
    const kept = localStorage.getItem(KEY);
    if (CHOICES.includes(kept)) chosen = kept;
  } catch {
    // A page from a file may have no storage; then the choice lasts as long as the page.
  }

  const isDark = () => !isPrinting && (chosen === "dark" || (chosen === "auto" && system.matches));

  function apply() {
    const theme = isDark() ? "dark" : "light";
    if (document.documentElement.dataset.theme === theme) return;
    document.documentElement.dataset.theme = theme;
    for (const listener of listeners) listener();
  }

  function choose(choice) {
    chosen = choice;
    try {
      localStorage.setItem(KEY, choice);
    } catch {
      // See above.
    }
    apply();
  }

  // A button that goes through the choices; its text is the current one.
  function makeButton() {
    const button = document.createElement("button");
    button.type = "button";
    button.id = "theme";
    const label = () => {
      button.textContent = { auto: "◐ auto", light: "○ light", dark: "● dark" }[chosen];
      button.title = "colours: as the system wishes, light, or dark";
    };
    button.addEventListener("click", () => {
      choose(CHOICES[(CHOICES.indexOf(chosen) + 1) % CHOICES.length]);
      label();
    });
    label();
    return button;
  }

  const print = (value) => {
    isPrinting = value;
    apply();
  };
  system.addEventListener("change", apply);
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  apply();
  return { isDark, makeButton, onChange: (listener) => listeners.push(listener) };
})();
