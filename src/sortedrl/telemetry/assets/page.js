// Draws the figures of a page, for both report and dashboard. This script makes no requests.
"use strict";
const pageCharts = (() => {
  const config = { responsive: true, displayModeBar: false };
  // On a touch screen, a finger that scrolls the page must not zoom a chart.
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const chosen = new Map(); // the time range that the reader has chosen, by chart
  const latest = new Map(); // the last figure drawn, by chart

  function draw(name, figure) {
    const div = document.getElementById("chart-" + name);
    if (!div) return Promise.resolve();
    latest.set(name, figure);
    if (isTouch) figure.layout.dragmode = false;
    const views = figure.layout.meta && figure.layout.meta.views;
    if (views) {
      const view = chosen.get(name) || figure.layout.meta.view;
      figure.layout.xaxis.range = [...views[view]];
      showViewButtons(name, div, Object.keys(views), view);
    }
    const isFirst = !div.classList.contains("js-plotly-plot");
    return Plotly.react(div, figure.data, figure.layout, config).then(() => {
      setViewBox(div);
      if (isFirst) {
        div.on("plotly_click", (event) => click(name, div, event));
        div.on("plotly_afterplot", () => setViewBox(div));
      }
      div.dispatchEvent(new CustomEvent("drawn", { bubbles: true }));
    });
  }

  function showViewButtons(name, div, names, current) {
    let bar = div.previousElementSibling;
    if (!bar || !bar.classList.contains("views")) {
      bar = document.createElement("div");
      bar.className = "views";
      div.before(bar);
      for (const view of names) {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = view;
        button.addEventListener("click", () => choose(name, view));
        bar.append(button);
      }
    }
    for (const button of bar.children) button.setAttribute("aria-pressed", String(button.textContent === current));
  }

  function choose(name, view) {
    chosen.set(name, view);
    const div = document.getElementById("chart-" + name);
    const figure = latest.get(name);
    showViewButtons(name, div, Object.keys(figure.layout.meta.views), view);
    Plotly.relayout(div, { "xaxis.range": [...figure.layout.meta.views[view]] });
  }

  function click(name, div, event) {
    const point = event.points[0];
    if (!point || !Array.isArray(point.customdata)) return;
    const sample = point.customdata[0];
    let line = div.nextElementSibling;
    if (!line || !line.classList.contains("picked")) {
      line = document.createElement("p");
      line.className = "picked";
      div.after(line);
    }
    line.textContent = name.startsWith("timeline") ? describe(sample, latest.get(name)) : "sample " + sample;
    div.dispatchEvent(new CustomEvent("sample", { bubbles: true, detail: { sample, chart: name } }));
  }

  // Describes the bars of one sample in a timeline.
  function describe(sample, figure) {
    const bars = figure.data.find((trace) => trace.type === "bar");
    const parts = bars.customdata
      .filter((data) => data[0] === sample)
      .map((data) => `attempt ${data[1]} (${data[3]}) under version ${data[2]}: ${data[4]} at ${data[5]} tokens`);
    return `Sample ${sample}. ${parts.join("; ")}.`;
  }

  function drawAll(figures) {
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

  return { drawAll };
})();
const figuresOfPage = document.getElementById("figures");
if (figuresOfPage) pageCharts.drawAll(JSON.parse(figuresOfPage.textContent));
