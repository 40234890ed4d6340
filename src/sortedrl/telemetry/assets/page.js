// Draws the figures of a page, for both report and dashboard: colours of the theme, smoothing, CSV, and the contents.
// Text from runs is inserted with textContent only. This script makes no requests.
"use strict";
const pageCharts = (() => {
  const config = { responsive: true, displayModeBar: false };
  // On a touch screen, a finger that scrolls the page must not zoom a chart.
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const chosen = new Map(); // the time range that the reader has chosen, by chart
  const latest = new Map(); // the last figure, as the server made it, by chart
  const WINDOWS = [1, 2, 4, 8, 16, 32, 64, 128, 256];
  let smoothing = null; // points that a smoothed line is a mean of; null: not chosen by the reader
  const make = (tag, text, className) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };

  // ---- colours -------------------------------------------------------------------------------------------------------

  // What the server draws for white paper, and what takes its place on a dark page.
  const DARK = {
    "#ffffff": "#161c24", "#1b2430": "#dce3ec", "#e6e9ee": "#2b3440", "#b4bcc8": "#566273", "#000000": "#ffffff",
    "#0072b2": "#3388d8", "#d55e00": "#f07c2a", "#009e73": "#2bbd92",
  };

  function recoloured(value) {
    if (typeof value === "string") return DARK[value.toLowerCase()] || value;
    if (Array.isArray(value)) return value.length <= 16 ? value.map(recoloured) : value;
    if (value === null || typeof value !== "object" || value.bdata) return value;
    const copy = {};
    for (const [key, part] of Object.entries(value)) copy[key] = key === "text" || key === "customdata" ? part : recoloured(part);
    return copy;
  }

  // ---- smoothing -----------------------------------------------------------------------------------------------------

  function defaultWindow() {
    const wanted = Number(document.querySelector("main").dataset.smoothing || 1);
    return WINDOWS.find((value) => value >= wanted) || WINDOWS.at(-1);
  }

  const window_ = () => (smoothing === null ? defaultWindow() : smoothing);

  function trailingMeans(values, count) {
    let total = 0;
    return values.map((value, at) => {
      total += value;
      if (at >= count) total -= values[at - count];
      return total / Math.min(at + 1, count);
    });
  }

  // Replaces each curve by a thin line through every point and a thick one through the means.
  function smoothed(traces) {
    const count = window_();
    return traces.flatMap((trace) => {
      if (!trace.meta || !trace.meta.smooth || count === 1 || trace.y.length < 2) return [trace];
      const mean = { ...trace, y: trailingMeans(trace.y, count), meta: { isMean: true } };
      if (trace.hoverinfo === "skip") return [mean]; // the edge of a band
      return [{ ...trace, line: { color: trace.line.color, width: 1 }, opacity: pageTheme.isDark() ? 0.6 : 0.38, hoverinfo: "skip", hovertemplate: undefined }, mean];
    });
  }

  function addSmoothing() {
    for (const id of ["section-learning", "section-learner"]) {
      const section = document.getElementById(id);
      if (!section || section.querySelector(".smoothing")) continue;
      const label = make("label", "Smoothing ", "smoothing");
      const slider = make("input");
      slider.type = "range";
      slider.min = 0;
      slider.max = WINDOWS.length - 1;
      slider.addEventListener("input", () => {
        smoothing = WINDOWS[slider.value];
        showWindow();
        redraw((figure) => figure.data.some((trace) => trace.meta && trace.meta.smooth));
      });
      label.append(slider, make("output"));
      section.querySelector("h2").after(label);
    }
    showWindow();
  }

  function showWindow() {
    for (const label of document.querySelectorAll(".smoothing")) {
      label.querySelector("input").value = WINDOWS.indexOf(window_());
      label.querySelector("output").textContent = window_() === 1 ? "off" : `mean of ${window_()} points`;
    }
  }

  // ---- drawing -------------------------------------------------------------------------------------------------------

  function draw(name, figure) {
    const div = document.getElementById("chart-" + name);
    if (!div) return Promise.resolve();
    latest.set(name, figure);
    const data = smoothed(figure.data);
    const shown = pageTheme.isDark() ? recoloured({ data, layout: figure.layout }) : { data, layout: { ...figure.layout } };
    if (figure.layout.meta && figure.layout.meta.keepsColours) shown.data = data; // those of the key above it
    if (isTouch) shown.layout.dragmode = false;
    const tools = toolsOf(name, div);
    const views = figure.layout.meta && figure.layout.meta.views;
    if (views) {
      const view = chosen.get(name) || figure.layout.meta.view;
      shown.layout.xaxis = { ...shown.layout.xaxis, range: [...views[view]] };
      showViewButtons(name, tools, Object.keys(views), view);
    }
    const isFirst = !div.classList.contains("js-plotly-plot");
    return Plotly.react(div, shown.data, shown.layout, config).then(() => {
      setViewBox(div);
      if (isFirst) {
        div.on("plotly_click", (event) => click(name, div, event));
        div.on("plotly_afterplot", () => setViewBox(div));
      }
      div.dispatchEvent(new CustomEvent("drawn", { bubbles: true }));
    });
  }

  function redraw(isWanted = () => true) {
    for (const [name, figure] of latest) if (isWanted(figure)) draw(name, figure);
  }

  // The row above a chart: its title or its views, and the button that saves its figures.
  function toolsOf(name, div) {
    let tools = div.previousElementSibling;
    if (tools && tools.classList.contains("tools")) return tools;
    const title = tools && tools.classList.contains("chart-title") ? tools : null;
    tools = make("div", undefined, "tools");
    div.before(tools);
    tools.append(title || make("div", undefined, "views"));
    const button = make("button", "CSV", "csv");
    button.type = "button";
    button.title = "save the figures of this chart";
    button.addEventListener("click", () => save(name, div));
    tools.append(button);
    return tools;
  }

  function showViewButtons(name, tools, names, current) {
    const bar = tools.querySelector(".views");
    if (!bar.children.length) {
      for (const view of names) {
        const button = make("button", view);
        button.type = "button";
        button.addEventListener("click", () => choose(name, view));
        bar.append(button);
      }
    }
    for (const button of bar.children) button.setAttribute("aria-pressed", String(button.textContent === current));
  }

  function choose(name, view) {
    chosen.set(name, view);
    const div = document.getElementById("chart-" + name);
    const views = latest.get(name).layout.meta.views;
    showViewButtons(name, toolsOf(name, div), Object.keys(views), view);
    Plotly.relayout(div, { "xaxis.range": [...views[view]] });
  }

  function click(name, div, event) {
    const point = event.points[0];
    if (!point || !Array.isArray(point.customdata)) return;
    const sample = point.customdata[0];
    let line = div.nextElementSibling;
    if (!line || !line.classList.contains("picked")) {
      line = make("p", undefined, "picked");
      div.after(line);
    }
    line.textContent = name.startsWith("timeline") ? describe(sample, latest.get(name)) : "sample " + sample;
    div.dispatchEvent(new CustomEvent("sample", { bubbles: true, detail: { sample, chart: name } }));
  }

  // Describes the bars of one sample in a timeline.
  function describe(sample, figure) {
    const parts = figure.data
      .filter((trace) => trace.type === "bar")
      .flatMap((trace) => trace.customdata.map((data, at) => ({ data, start: trace.base[at], isTool: trace.meta && trace.meta.tools })))
      .filter(({ data }) => data[0] === sample)
      .sort((one, other) => one.start - other.start)
      .map(({ data, isTool }) => isTool
        ? `tools of turn ${data[1]}: ${data[4]} after ${data[5]} s`
        : `attempt ${data[1]} (${data[3]}) under version ${data[2]}: ${data[4]} at ${data[5]} tokens`);
    return `Sample ${sample}. ${parts.join("; ")}.`;
  }

  function drawAll(figures) {
    addSmoothing();
    const names = Object.keys(figures);
    const next = () => (names.length ? (draw(names[0], figures[names.shift()]), setTimeout(next)) : done());
    const done = () => document.documentElement.setAttribute("data-drawn", "yes");
    next();
  }

  // Paper is narrower than a window. With a view box, charts are scaled to the paper instead of cut.
  function setViewBox(div) {
    const box = div.querySelector(".svg-container");
    for (const svg of box.querySelectorAll(":scope > .main-svg")) {
      svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
      box.style.setProperty("--shape", svg.getAttribute("width") + " / " + svg.getAttribute("height"));
    }
  }

  // ---- CSV -----------------------------------------------------------------------------------------------------------

  const plain = (text) => text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&quot;/g, '"').replace(/&#x27;/g, "'").replace(/&amp;/g, "&");

  // A spreadsheet must not take text of a run for a formula.
  function cell(value) {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return Number.isFinite(value) ? String(value) : "";
    const text = plain(String(value));
    return '"' + (/^[=+\-@\t\r]/.test(text) ? "'" : "") + text.replace(/"/g, '""') + '"';
  }

  // One line per point of every curve, without the smoothed ones.
  function csv(div) {
    const lines = [["series", "x", "y", "z", "base", "more"].join(",")];
    for (const trace of div._fullData) {
      if (trace.meta && trace.meta.isMean) continue;
      const name = trace.name || "";
      if (trace.type === "heatmap") {
        trace.z.forEach((row, at) => row.forEach((z, column) => lines.push([name, trace.x[column], trace.y[at], z].map(cell).join(","))));
        continue;
      }
      const [x, y] = [trace.x || [], trace.y || []];
      for (let at = 0; at < x.length; at++) {
        if (x[at] === null || y[at] === null) continue;
        const base = Array.isArray(trace.base) || ArrayBuffer.isView(trace.base) ? trace.base[at] : null;
        const more = trace.customdata ? [].concat(trace.customdata[at]).join(" ") : null;
        lines.push([name, x[at], y[at], null, base, more].map(cell).join(","));
      }
    }
    return lines.join("\r\n") + "\r\n";
  }

  function save(name, div) {
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([csv(div)], { type: "text/csv" }));
    link.download = name + ".csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  // ---- contents ------------------------------------------------------------------------------------------------------

  const isWide = matchMedia("(min-width: 1100px)");
  let seen = null;

  // The contents stay in sight: beside the page where there is room, else behind a button of the bar.
  function showContents() {
    let box = document.getElementById("contents");
    if (!box) {
      box = make("details");
      box.id = "contents";
      box.append(make("summary", "Contents"), make("ul"));
      const bar = document.querySelector(".bar");
      bar.append(box, pageTheme.makeButton());
      const fit = () => (box.open = isWide.matches);
      isWide.addEventListener("change", fit);
      fit();
      document.addEventListener("click", (event) => {
        if (!isWide.matches && !box.contains(event.target)) box.open = false;
      });
    }
    const sections = [...document.querySelectorAll("main section[id]")];
    const entries = new Map();
    for (const section of sections) {
      const button = make("button", section.querySelector("h2").textContent);
      button.type = "button";
      button.addEventListener("click", () => {
        if (!isWide.matches) box.open = false;
        section.scrollIntoView();
      });
      entries.set(section, button);
    }
    box.querySelector("ul").replaceChildren(...[...entries.values()].map((button) => {
      const item = make("li");
      item.append(button);
      return item;
    }));
    if (seen) seen.disconnect();
    const visible = new Set();
    seen = new IntersectionObserver((changes) => {
      for (const change of changes) change.isIntersecting ? visible.add(change.target) : visible.delete(change.target);
      const first = sections.find((section) => visible.has(section));
      for (const [section, button] of entries) button.toggleAttribute("aria-current", section === first);
    }, { rootMargin: "-70px 0px -40% 0px" });
    for (const section of sections) seen.observe(section);
  }

  pageTheme.onChange(() => redraw());
  const forget = () => latest.clear();
  return { drawAll, showContents, forget, make, csv };
})();
const figuresOfPage = document.getElementById("figures");
if (figuresOfPage) {
  pageCharts.showContents();
  pageCharts.drawAll(JSON.parse(figuresOfPage.textContent));
}
