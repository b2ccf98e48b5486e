"use strict";
(() => {
  const FEW = 4; // panels that are shown side by side; of more than these one is chosen
  const root = document.documentElement;
  const book = JSON.parse(document.getElementById("charts").textContent);
  const hidden = new Set(); // places of variants that are not drawn
  const hover = matchMedia("(hover: hover) and (pointer: fine)");
  const drawn = []; // functions, one for each figure

  function colour(name, opacity = 1) {
    const hex = getComputedStyle(root).getPropertyValue("--" + name).trim().replace("#", "");
    const full = hex.length === 3 ? [...hex].map((c) => c + c).join("") : hex;
    const parts = [0, 2, 4].map((k) => parseInt(full.slice(k, k + 2), 16));
    return `rgba(${parts.join(",")},${opacity})`;
  }

  // A mark of a variant as plotly's traces; figures.py says what marks are.
  function traces(mark, panel) {
    const [name, place, dash, symbol] = book.styles[mark.v];
    const tone = (opacity) => colour("v" + place, opacity);
    const { y } = mark;
    const x = mark.x ?? panel.x;
    const value = panel.format ? `%{y:${panel.format}}` : "%{y}";
    const extra = "<extra>%{fullData.name}</extra>";
    const seeds = mark.n ? ", %{customdata} seeds" : "";
    const base = { type: "scatter", name, x, y, customdata: mark.n,
      line: { color: tone(), dash, width: 2 }, marker: { color: tone(), symbol, size: 7 } };
    const bars = { type: "data", array: mark.s, color: tone(0.6), thickness: 1.2, width: 3 };
    const spread = mark.s ? ` ± %{error_y.array${panel.format ? ":" + panel.format : ""}}` : "";
    if (mark.k === "line") {
      const line = { ...base, mode: x.length <= 12 ? "lines+markers" : "lines",
        hovertemplate: value + extra };
      if (!mark.s) return [line];
      const low = y.map((v, i) => v - mark.s[i]), high = y.map((v, i) => v + mark.s[i]);
      return [{ type: "scatter", mode: "lines", x: [...x, ...[...x].reverse()],
        y: [...high, ...low.reverse()], fill: "toself", fillcolor: tone(0.14),
        line: { width: 0, color: tone(0) }, hoverinfo: "skip" }, line];
    }
    if (mark.k === "ended") {
      return [{ ...base, mode: "lines+markers", line: { color: tone(0.7), width: 1, dash: "dot" },
        marker: { color: tone(), symbol: "x", size: x.map((_, i) => (i === x.length - 1 ? 9 : 0)) },
        hovertemplate: value + " (lost)" + extra }];
    }
    if (mark.k === "points") {
      const said = x.map((v, i) => [v, mark.n[i]]);
      return [{ ...base, x: apart(x, mark, panel), customdata: said, mode: "lines+markers",
        error_y: mark.s ? bars : undefined,
        hovertemplate: "%{customdata[0]}: " + value + spread + ", %{customdata[1]} seeds" + extra }];
    }
    if (mark.k === "published") {
      return [{ ...base, mode: "lines+markers", line: { color: tone(0.7), width: 1.4, dash: "dot" },
        marker: { color: tone(), symbol: symbol + "-open", size: 9, line: { width: 1.5 } },
        hovertemplate: "%{x}: " + value + " published" + extra }];
    }
    if (mark.k === "dot") {
      return [{ ...base, mode: "markers", marker: { color: tone(), symbol, size: 11 },
        error_y: mark.s ? bars : undefined,
        hovertemplate: value + spread + " in %{x:.3~g} s" + seeds + extra }];
    }
    return pairs(mark, name, x, tone, panel.format, extra);
  }

  // Variants stand a little beside each other, or their bars would hide each other.
  function apart(x, mark, panel) {
    const { type, tickvals } = panel.layout.xaxis;
    const all = panel.marks.filter((each) => each.k === "points");
    if (!tickvals || tickvals.length < 2) return x;
    const scale = type === "log" ? Math.log10 : (v) => v;
    const places = tickvals.map(scale);
    const span = Math.max(...places) - Math.min(...places);
    const by = (all.indexOf(mark) - (all.length - 1) / 2) * span * Math.min(0.008, 0.06 / all.length);
    return x.map((v) => (type === "log" ? v * 10 ** by : v + by));
  }

  // Heights of the dots of a row, the first seed above the middle and the last below.
  function spread(count, row) {
    return Array.from({ length: count }, (_, i) => row + (count > 1 ? 0.26 - (0.52 * i) / (count - 1) : 0));
  }

  // The interval as a bar, a dot for each seed, and a stroke for the mean.
  function pairs(mark, name, x, tone, format, extra) {
    const value = `%{x:${format}}`, plain = format.replace("+", "");
    const row = { type: "scatter", name };
    return [
      { ...row, mode: "lines", x: mark.ends, y: mark.ends.map(() => mark.row),
        line: { color: tone(0.45), width: 7 }, hovertemplate: "end of the 95 % interval: " + value + extra },
      { ...row, mode: "markers", x, y: spread(x.length, mark.row), customdata: mark.both,
        marker: { color: tone(0.85), size: 7, line: { width: 1, color: colour("card") } },
        hovertemplate: mark.both ? "seed %{customdata[0]}: " + value +
          `<br>%{customdata[1]:${plain}} against %{customdata[2]:${plain}}` + extra : value + extra },
      { ...row, mode: "markers", x: [mark.mean], y: [mark.row],
        marker: { color: colour("ink"), symbol: "line-ns-open", size: 15, line: { width: 2.5 } },
        hovertemplate: "mean: " + value + extra },
    ];
  }

  // A long name keeps its ends: variants often differ in the last words. Names are escaped.
  function shortened(text, most) {
    const signs = { "&amp;": "&", "&lt;": "<", "&gt;": ">" };
    const plain = [...text.replace(/&(amp|lt|gt);/g, (sign) => signs[sign])];
    if (plain.length <= most) return text;
    const half = Math.floor((most - 1) / 2);
    const back = Object.fromEntries(Object.entries(signs).map(([sign, one]) => [one, sign]));
    return [...plain.slice(0, half), "…", ...plain.slice(-half)].map((c) => back[c] ?? c).join("");
  }

  // Whoever hides a variant that is far off wants to see the others large.
  function fitted(panel, shown) {
    const bounds = (values, share) => {
      const low = Math.min(...values), high = Math.max(...values);
      const room = share * (high - low) || 1;
      return { range: [low - room, high + room] };
    };
    if (!hidden.size || !shown.length) return {};
    const at = (mark) => mark.x ?? panel.x;
    if (shown[0].k === "pairs") {
      return { xaxis: bounds([0, ...shown.flatMap((mark) => [...at(mark), ...mark.ends])], 0.06) };
    }
    if (!panel.layout.yaxis.range) return {}; // plotly fits it
    // as curves.py does: from where it says, and without runs that were lost or are far from others
    const log = panel.layout.yaxis.type === "log";
    const lines = shown.filter((mark) => mark.k === "line");
    const begin = panel.layout.begin ?? 0;
    const exponent = (values) => (log ? values.filter((v) => v > 0).map(Math.log10) : values);
    const reaches = (lines.length ? lines : shown).map((mark) => {
      const points = at(mark).map((x, i) => [x, mark.y[i], mark.s?.[i] ?? 0]).filter(([x]) => x >= begin);
      return { means: exponent(points.map(([, y]) => y)), lows: exponent(points.map(([, y, s]) => y - s)),
        highs: exponent(points.map(([, y, s]) => y + s)) };
    }).filter((reach) => reach.means.length);
    if (!reaches.length) return {};
    const tozero = panel.layout.yaxis.rangemode === "tozero" ? [0] : [];
    return { yaxis: bounds([...boundsOf(reaches), ...tozero], 0.05) };
  }

  function median(values) {
    const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
    return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  }

  // Room for all curves, and for their bands unless one of these is far higher than usual.
  function boundsOf(reaches) {
    const means = reaches.flatMap((each) => each.means);
    const low = Math.min(...means), high = Math.max(...means);
    const heights = reaches.map((each) => Math.max(...each.highs) - Math.max(...each.means));
    const room = Math.max((high - low) / 2, 2 * median(heights));
    const bands = reaches.flatMap((each) => [...each.lows, ...each.highs]);
    return [Math.max(Math.min(low, ...bands), low - room), Math.min(Math.max(high, ...bands), high + room)];
  }

  function layoutOf(panel, width, fit) {
    const { strip, begin, ...own } = panel.layout;
    const names = own.yaxis.ticktext?.map((name) => shortened(name, Math.max(width / 20, 12)));
    const line = { gridcolor: colour("grid"), zerolinecolor: colour("soft", 0.7),
      linecolor: colour("line"), automargin: true, zeroline: false, ticks: "" };
    return {
      ...own,
      width,
      // copies: plotly writes into what it is given
      xaxis: { ...line, ...structuredClone(own.xaxis), ...fit.xaxis },
      yaxis: { ...line, ...structuredClone(own.yaxis), ...(names && { ticktext: names }), ...fit.yaxis },
      shapes: strip ? [{ type: "rect", yref: "paper", x0: strip[0], x1: strip[1], y0: 0, y1: 1,
        line: { width: 0 }, fillcolor: colour("soft", 0.12), layer: "below" }] : [],
      font: { family: "system-ui, sans-serif", size: 12, color: colour("soft") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 48, r: 12, t: 12, b: 44 },
      showlegend: false,
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"),
        font: { color: colour("ink") } },
      // a finger that moves down the page must not drag the chart
      dragmode: hover.matches ? "zoom" : false,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft", 0.6), activecolor: colour("ink") },
    };
  }

  function draw(place, panel, about) {
    const shown = panel.marks.filter((mark) => !hidden.has(mark.v));
    const layout = layoutOf(panel, Math.max(place.clientWidth, 200), fitted(panel, shown));
    place.setAttribute("aria-label", [...about, panel.title].filter(Boolean).join(", "));
    Plotly.react(place, shown.flatMap((mark) => traces(mark, panel)), layout, {
      displaylogo: false, responsive: false, displayModeBar: hover.matches ? "hover" : false,
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] });
  }

  function chooser(names, label, changed) {
    const select = document.createElement("select");
    select.setAttribute("aria-label", label);
    names.forEach((name, i) => select.add(new Option(name, i)));
    select.addEventListener("change", () => changed(Number(select.value)));
    return select;
  }

  function figure(section) {
    const views = book.figures[section.dataset.figure];
    const choices = section.querySelector(".choices");
    const panels = section.querySelector(".panels");
    const title = section.querySelector("h3").textContent;
    let view = 0, chosen = "";
    if (views.length > 1) {
      choices.append(chooser(views.map((v) => v.title), "what is shown", (k) => { view = k; show(); }));
    }
    let which = null;
    function show() {
      const all = views[view].panels;
      let shown = all;
      if (which) which.remove();
      if (all.length > FEW) {
        const titles = all.map((p) => p.title);
        const index = Math.max(titles.indexOf(chosen), 0);
        which = chooser(titles, "where", (k) => { chosen = titles[k]; show(); });
        which.value = String(index);
        choices.append(which);
        shown = [all[index]];
      }
      if (panels.children.length !== shown.length) {
        panels.replaceChildren(...shown.map(() => {
          const box = document.createElement("div");
          box.className = "panel";
          const chart = document.createElement("div");
          chart.className = "chart";
          chart.setAttribute("role", "img");
          box.append(document.createElement("h4"), chart);
          return box;
        }));
      }
      panels.classList.toggle("single", shown.length === 1);
      shown.forEach((panel, i) => {
        const box = panels.children[i];
        box.querySelector("h4").textContent = panel.title; // never markup: users name cells
        draw(box.querySelector(".chart"), panel, [title, views.length > 1 && views[view].title]);
      });
    }
    drawn.push(show);
    show();
  }

  const redraw = () => drawn.forEach((show) => show());

  // Headings sort: numbers as numbers, what is empty last, equal rows in the order they had.
  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const body = table.tBodies[0];
        const rows = [...body.rows].map((row) => [key(row.cells[column]), row]);
        rows.sort(([a], [b]) => {
          if (a === "" || b === "") return (a === "") - (b === "");
          const order = typeof a === "number" && typeof b === "number"
            ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
          return down ? -order : order;
        });
        body.append(...rows.map(([, row]) => row));
      });
    });
  }

  function key(cell) {
    const said = (cell.dataset.v ?? cell.textContent).trim();
    return said !== "" && Number.isFinite(Number(said)) ? Number(said) : said;
  }

  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll(".figure").forEach(figure);
  document.querySelectorAll(".chip").forEach((chip) => {
    chip.addEventListener("click", () => {
      const place = Number(chip.dataset.variant);
      if (!hidden.delete(place)) hidden.add(place);
      chip.setAttribute("aria-pressed", String(!hidden.has(place)));
      redraw();
    });
  });

  let waiting = 0, width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar changes the height
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(redraw, 150);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Paper is white and has its own width, whatever the screen has.
  const closed = new Set();
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    document.querySelectorAll("details[data-print]:not([open])").forEach((each) => {
      closed.add(each);
      each.open = true;
    });
    redraw();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    closed.forEach((each) => { each.open = false; });
    closed.clear();
    redraw();
  });
  root.dataset.ready = "yes";
})();
