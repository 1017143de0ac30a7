"use strict";
// Everything that comes from files is written with textContent or drawn on a canvas, and never becomes markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const ranks = data.ranks;
  const KINDS = ["forward", "backward", "step", "update", "reduce", "gather", "other"];
  const ROW = 24, GAP = 3, LANE_GAP = 4;
  const end = Math.max(1, data.end);
  const stepCount = Math.min(...ranks.map((rank) => rank.windows.length));
  const state = { first: data.first, last: data.last, a: 0, b: end, hover: null };
  let colour = {}, hatch = null;

  // ---- small tools
  const make = (tag, text, className) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    return node;
  };
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const ms = (us) => {
    const value = us / 1000;
    const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : Math.abs(value) >= 1 ? 2 : 3;
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  };
  const percent = (part) => (part === null ? "–" : `${(100 * part).toFixed(1)} %`);
  const bytes = (count) => {
    if (count < 1000) return `${count} B`;
    const units = ["kB", "MB", "GB", "TB"];
    let value = count / 1000, unit = 0;
    while (value >= 1000 && unit < 3) { value /= 1000; unit += 1; }
    return `${value.toPrecision(3)} ${units[unit]}`;
  };
  const firstEndingAfter = (row, time) => {
    let low = 0, high = row.start.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.start[middle] + row.span[middle] <= time) low = middle + 1; else high = middle;
    }
    return low;
  };
  const firstAfter = (stretches, time) => {
    let low = 0, high = stretches.length;
    while (low < high) { const middle = (low + high) >> 1; if (stretches[middle][1] <= time) low = middle + 1; else high = middle; }
    return low;
  };
  const overlap = (stretches, from, to) => {
    let low = firstAfter(stretches, from), found = 0;
    for (; low < stretches.length && stretches[low][0] < to; low += 1) {
      found += Math.min(to, stretches[low][1]) - Math.max(from, stretches[low][0]);
    }
    return found;
  };

  // ---- figures: [duration, communication, reduce, gather, waited, exposed] per step and rank
  const sums = (rank, first, last) => {
    const total = [0, 0, 0, 0, 0, 0];
    for (let step = first - 1; step < last; step += 1) rank.figures[step].forEach((value, index) => { total[index] += value; });
    return total;
  };
  const mean = (total, count) => total.map((value) => value / Math.max(count, 1));
  const hiddenShare = (figures) => (figures[1] > 0 ? 1 - figures[5] / figures[1] : null);
  const overall = () => ranks.map((rank) => sums(rank, state.first, state.last))
    .reduce((one, other) => one.map((value, index) => value + other[index]));

  const meanByStep = Array.from({ length: stepCount }, (_, step) => mean(
    ranks.map((rank) => rank.figures[step]).reduce((one, other) => one.map((value, index) => value + other[index])), ranks.length,
  ));

  const put = (id, text, unit) => {
    byId(id).textContent = text;
    if (unit) byId(id).append(" ", make("small", unit));
  };
  const showFigures = () => {
    const steps = state.last - state.first + 1;
    const figures = mean(overall(), steps * ranks.length);
    const hidden = hiddenShare(figures);
    const per = data.steps ? "per step" : "in all";
    put("hidden", percent(hidden));
    byId("share-hidden").style.width = hidden === null ? "0" : `${100 * hidden}%`;
    byId("share-exposed").style.width = hidden === null ? "0" : `${100 * (1 - hidden)}%`;
    const range = data.steps ? (steps === 1 ? `step ${state.first}` : `steps ${state.first} to ${state.last}`) : "the whole recording";
    put("share-words", hidden === null ? "no communication was recorded" : `over ${range}, ${ranks.length} rank${ranks.length > 1 ? "s" : ""}`);
    put("duration", ms(figures[0]), "ms");
    put("duration-words", data.steps ? "from step to step" : "from first to last span");
    put("communication", ms(figures[1]), "ms");
    put("communication-words", `${per}: reduce ${ms(figures[2])}, gather ${ms(figures[3])}`);
    put("exposed", ms(figures[5]), "ms");
    put("exposed-words", figures[0] > 0 ? `${per}: ${percent(figures[5] / figures[0])} of the time` : per);
    byId("first").value = state.first;
    byId("last").value = state.last;
    showRankTable(steps);
    showStepTable();
  };
  const row = (cells, className, header) => {
    const line = make("tr", undefined, className);
    cells.forEach((cell) => {
      const node = make(header ? "th" : "td", cell);
      if (header) node.scope = "col";
      line.append(node);
    });
    return line;
  };
  const cells = (figures) => [...figures.map(ms), percent(hiddenShare(figures))];
  const HEADINGS = ["ms", "communication", "reduce", "gather", "waited", "exposed", "hidden"];
  const showRankTable = (steps) => {
    const lines = [row(["rank", "steps", ...HEADINGS], "", true)];
    if (data.steps && state.first > 1) {
      ranks.forEach((rank) => lines.push(row([`${rank.rank}, step 1`, "1", ...cells(sums(rank, 1, 1))], "warm")));
    }
    ranks.forEach((rank) => {
      lines.push(row([String(rank.rank), data.steps ? String(steps) : "–", ...cells(mean(sums(rank, state.first, state.last), steps))]));
    });
    if (ranks.length > 1) lines.push(row(["all", data.steps ? String(steps) : "–", ...cells(mean(overall(), steps * ranks.length))], "all"));
    byId("by-rank").replaceChildren(...lines);
    ranks.forEach((rank) => { rank.part.textContent = `hidden ${percent(hiddenShare(sums(rank, state.first, state.last)))}`; });
  };
  const MOST_ROWS = 400;
  const showStepTable = () => {
    if (!byId("steps-table").open) return;
    const lines = [row(["step", "rank", ...HEADINGS], "", true)];
    for (let step = state.first; step <= state.last && lines.length < MOST_ROWS; step += 1) {
      ranks.forEach((rank) => lines.push(row([String(step), String(rank.rank), ...cells(rank.figures[step - 1])])));
    }
    byId("by-step").replaceChildren(...lines);
  };
  const showSpanTable = () => {
    if (!byId("spans-table").open) return;
    const found = [];
    ranks.forEach((rank) => rank.rows.concat(rank.waits).forEach((one) => {
      for (let at = firstEndingAfter(one, state.a); at < one.start.length && one.start[at] < state.b && found.length < 20000; at += 1) {
        found.push([one.start[at], rank, one, at]);
      }
    }));
    found.sort((one, other) => one[0] - other[0]);
    const lines = [row(["at, ms", "ms", "rank", "lane", "span", "details"], "", true)];
    lines[0].lastChild.className = "words";
    found.slice(0, MOST_ROWS).forEach(([start, rank, one, at]) => {
      const line = row([ms(start), ms(one.span[at]), String(rank.rank), one.lane, data.names[one.name[at]]]);
      line.append(make("td", detailsOf(one, at).map(([key, value]) => `${key} ${value}`).join(", "), "words"));
      lines.push(line);
    });
    byId("by-span").replaceChildren(...lines);
    byId("spans-words").textContent = found.length > MOST_ROWS ? `The first ${MOST_ROWS} of ${found.length >= 20000 ? "20,000 or more" : found.length}; zoom in for the rest.` : "";
  };
  const detailsOf = (one, at) => data.details[one.info[at]].map(([key, value]) => {
    if ((key === "bytes" || key === "sent") && typeof value === "number") return [key, bytes(value)];
    return [key === "target" ? "waited for" : key, String(value)];
  });

  // ---- drawing
  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    const names = [...KINDS, "paper", "card", "ink", "quiet", "line", "grid", "lane", "exposed", "idle", "label", "focus", "chosen"];
    colour = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    const tile = document.createElement("canvas");
    const scale = window.devicePixelRatio || 1;
    tile.width = tile.height = Math.round(7 * scale);
    const pen = tile.getContext("2d");
    pen.strokeStyle = colour.exposed;
    pen.lineWidth = 2.2 * scale;
    for (const shift of [-1, 0, 1]) {
      pen.beginPath();
      pen.moveTo((shift * 7 - 1) * scale, 8 * scale);
      pen.lineTo((shift * 7 + 8) * scale, -1 * scale);
      pen.stroke();
    }
    hatch = tile;
  };
  const gutter = () => (window.innerWidth < 760 ? 58 : 84);
  const prepared = (canvas, height) => {
    const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return [pen, width];
  };
  const hatched = (pen) => {
    const pattern = pen.createPattern(hatch, "repeat");
    const scale = window.devicePixelRatio || 1;
    pattern.setTransform(new DOMMatrix([1 / scale, 0, 0, 1 / scale, 0, 0]));
    return pattern;
  };
  const kindOf = (lane, name) => {
    if (lane !== "trainer") return name === "wait" ? "idle" : lane;
    if (name === "forward and backward") return "backward"; // where nobody could tell the two apart
    return KINDS.includes(name) ? name : "other";
  };
  const labelOf = (one, at, room) => {
    const bucket = data.details[one.info[at]].find(([key]) => key === "bucket" || key === "buckets");
    const name = data.names[one.name[at]];
    const options = bucket ? [`${name} ${bucket[1]}`, `bucket ${bucket[1]}`, String(bucket[1])] : [name];
    return options.find((text) => widthOf(text) <= room - 8) || "";
  };
  const widths = new Map();
  const measuring = document.createElement("canvas").getContext("2d");
  const widthOf = (text) => {
    if (!widths.has(text)) {
      if (widths.size > 5000) widths.clear();
      measuring.font = "12px system-ui, sans-serif";
      widths.set(text, measuring.measureText(text).width);
    }
    return widths.get(text);
  };
  const ticks = (width) => {
    const rough = (state.b - state.a) / Math.max(2, width / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const every = [1, 2, 5, 10].map((times) => times * power).find((value) => value >= rough);
    const found = [];
    for (let at = Math.ceil(state.a / every) * every; at <= state.b; at += every) found.push(at);
    return [found, every];
  };
  const tickText = (at, every) => {
    const digits = clamp(-Math.floor(Math.log10(every / 1000)), 0, 3);
    return (at / 1000).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  };
  const timeOf = (where, width) => state.a + ((where - gutter()) / (width - gutter())) * (state.b - state.a);
  const x = (time, width) => gutter() + ((time - state.a) / (state.b - state.a)) * (width - gutter());

  const drawAxis = () => {
    const [pen, width] = prepared(byId("axis"), 34);
    pen.fillStyle = colour.card;
    pen.fillRect(0, 0, width, 34);
    const [found, every] = ticks(width - gutter());
    pen.fillStyle = colour.quiet;
    pen.textAlign = "left";
    pen.fillText("ms", 16, 24);
    pen.textAlign = "center";
    found.forEach((at) => {
      const where = x(at, width);
      if (where < gutter() + 8 || where > width - 20) return;
      pen.fillText(tickText(at, every), where, 24);
      pen.fillRect(Math.round(where), 31, 1, 3);
    });
    pen.textAlign = "left";
    if (!data.steps) return;
    let free = gutter();
    ranks[0].windows.forEach(([from, to], index) => {
      if (to < state.a || from > state.b) return;
      const left = Math.max(x(from, width), gutter()), right = Math.min(x(to, width), width);
      const text = `step ${index + 1}`;
      if (right - left < widthOf(text) + 8 || left < free) return;
      pen.fillStyle = index + 1 >= state.first && index + 1 <= state.last ? colour.ink : colour.quiet;
      pen.fillText(text, left + 5, 9);
      pen.fillRect(Math.round(left), 2, 1, 14);
      free = left + widthOf(text) + 10;
    });
  };

  // Hatching over a label would be hard to read: where in a bar, from its left edge, there is room without.
  const freeFrom = (rank, one, begin, width) => {
    if (one.lane !== "trainer") return begin;
    let low = firstAfter(rank.exposed, timeOf(begin, width)), at = begin;
    for (; low < rank.exposed.length && x(rank.exposed[low][0], width) < at + 70; low += 1) at = Math.max(at, x(rank.exposed[low][1], width));
    return at;
  };
  const drawBars = (pen, rank, one, top, width) => {
    const left = gutter(), perUs = (width - left) / (state.b - state.a);
    // Bars narrower than a pixel are drawn together, as there may be a hundred thousand, and the paler the less they cover.
    let tiny = null;
    const flush = () => {
      if (!tiny) return;
      const wide = tiny.to - tiny.from;
      pen.fillStyle = tiny.fill;
      pen.globalAlpha = wide < 3 ? 1 : clamp(tiny.covered / wide, 0.25, 1);
      pen.fillRect(tiny.from, top, Math.max(wide, 0.7), ROW);
      pen.globalAlpha = 1;
      tiny = null;
    };
    for (let at = firstEndingAfter(one, state.a); at < one.start.length && one.start[at] < state.b; at += 1) {
      const from = left + (one.start[at] - state.a) * perUs, wide = one.span[at] * perUs;
      const fill = colour[kindOf(one.lane, data.names[one.name[at]])];
      if (wide < 1.5) {
        if (tiny && tiny.fill === fill && from - tiny.to < 0.6 && tiny.to - tiny.from < 8) {
          tiny.to = Math.max(tiny.to, from + wide);
          tiny.covered += wide;
        } else { flush(); tiny = { from, to: from + wide, fill, covered: wide }; }
        continue;
      }
      flush();
      const begin = Math.max(from, left), stop = Math.min(from + wide, width);
      pen.fillStyle = fill;
      if (wide > 6) { pen.beginPath(); pen.roundRect(begin, top, Math.max(stop - begin - 0.6, 0.7), ROW, 3); pen.fill(); }
      else pen.fillRect(begin, top, Math.max(stop - begin - 0.4, 0.7), ROW);
      const free = stop - begin > 16 ? freeFrom(rank, one, begin, width) : stop;
      if (stop - free > 16) {
        const text = labelOf(one, at, stop - free);
        if (text) { pen.fillStyle = fill === colour.idle ? colour.quiet : colour.label; pen.fillText(text, free + 5, top + ROW / 2 + 0.5); }
      }
    }
    flush();
  };
  const drawExposed = (pen, rank, top, width) => {
    const fill = hatched(pen), left = gutter();
    let low = firstAfter(rank.exposed, state.a);
    pen.strokeStyle = colour.exposed;
    let run = null; // stretches less than a pixel and a half apart are one to the eye
    const flush = () => {
      if (!run) return;
      const wide = run[1] - run[0], covered = run[2] / Math.max(wide, 0.7);
      pen.fillStyle = wide < 3 ? colour.exposed : fill;
      pen.globalAlpha = clamp(wide < 3 ? 0.6 * covered : covered, 0.1, 1);
      pen.fillRect(run[0], top, Math.max(wide, 0.7), ROW);
      pen.globalAlpha = 1;
      if (wide >= 7 && covered > 0.8) pen.strokeRect(run[0] + 0.5, top + 0.5, wide - 1, ROW - 1);
    };
    for (; low < rank.exposed.length && rank.exposed[low][0] < state.b; low += 1) {
      const from = Math.max(x(rank.exposed[low][0], width), left), to = Math.min(x(rank.exposed[low][1], width), width);
      if (run && from - run[1] < 1.5 && (run[1] - run[0] < 8 || run[2] > 0.8 * (run[1] - run[0]))) {
        run[1] = Math.max(run[1], to);
        run[2] += to - from;
      } else { flush(); run = [from, to, to - from]; }
    }
    flush();
  };
  const drawRank = (rank) => {
    const [pen, width] = prepared(rank.canvas, rank.height);
    const left = gutter();
    rank.lanes.forEach((lane) => {
      pen.fillStyle = colour.lane;
      pen.fillRect(left, lane.top - 1, width - left, lane.height + 2);
      pen.fillStyle = colour.quiet;
      pen.fillText(lane.name, left < 80 ? 8 : 16, lane.top + ROW / 2 + 0.5);
    });
    pen.fillStyle = colour.grid;
    ticks(width - left)[0].forEach((at) => { const where = x(at, width); if (where > left) pen.fillRect(Math.round(where), 0, 1, rank.height); });
    rank.rows.forEach((one) => drawBars(pen, rank, one, one.top, width));
    rank.lanes.forEach((lane) => { if (lane.name === "trainer") drawExposed(pen, rank, lane.top, width); });
    if (data.steps) {
      pen.strokeStyle = colour.ink;
      pen.globalAlpha = 0.55;
      pen.setLineDash([3, 3]);
      pen.beginPath();
      const apart = ((end / rank.windows.length) * (width - left)) / (state.b - state.a);
      if (apart > 12) rank.windows.forEach(([, to]) => {
        const where = Math.round(x(to, width)) + 0.5;
        if (where <= left || where > width) return;
        pen.moveTo(where, 0);
        pen.lineTo(where, rank.height);
      });
      pen.stroke();
      pen.setLineDash([]);
      pen.globalAlpha = 1;
    }
    if (state.hover && state.hover.rank === rank) {
      const { one, at } = state.hover;
      const from = Math.max(x(one.start[at], width), left), to = Math.min(x(one.start[at] + one.span[at], width), width);
      pen.strokeStyle = colour.ink;
      pen.lineWidth = 1.5;
      pen.strokeRect(from - 0.5, one.top - 0.5, Math.max(to - from, 1) + 1, ROW + 1);
      pen.lineWidth = 1;
    }
  };
  const drawStrip = () => {
    const [pen, width] = prepared(byId("strip"), 52);
    const each = width / stepCount, longest = meanByStep.reduce((most, one) => Math.max(most, one[0]), 1);
    // Steps narrower than a pixel share a column, which shows the longest of them.
    const columns = Math.min(stepCount, Math.floor(width));
    pen.fillStyle = colour.chosen;
    pen.fillRect((state.first - 1) * each, 0, (state.last - state.first + 1) * each, 52);
    const fill = hatched(pen);
    for (let column = 0; column < columns; column += 1) {
      const from = Math.floor((column * stepCount) / columns), to = Math.max(from + 1, Math.floor(((column + 1) * stepCount) / columns));
      let best = null;
      for (let step = from; step < to; step += 1) if (!best || meanByStep[step][0] > best[0]) best = meanByStep[step];
      const left = (column * width) / columns, wide = Math.max(width / columns - (width / columns > 4 ? 1.5 : 0), 0.7);
      const tall = (46 * best[0]) / longest, open = (46 * best[5]) / longest;
      const chosen = to > state.first - 1 && from < state.last;
      pen.globalAlpha = chosen ? 1 : 0.45;
      pen.fillStyle = colour.forward;
      pen.fillRect(left, 52 - tall, wide, tall);
      pen.fillStyle = wide < 3 ? colour.exposed : fill;
      pen.fillRect(left, 52 - open, wide, open);
      if (width / columns > 30) {
        pen.fillStyle = colour.label;
        if (tall > 16) pen.fillText(String(from + 1), left + 5, 52 - tall + 9);
      }
    }
    pen.globalAlpha = 1;
    if (!data.steps) return;
    const position = (time) => {
      const windows = ranks[0].windows;
      let low = 0, high = windows.length - 1;
      while (low < high) { const middle = (low + high) >> 1; if (windows[middle][1] < time) low = middle + 1; else high = middle; }
      const [from, to] = windows[low];
      return (low + clamp((time - from) / Math.max(to - from, 1), 0, 1)) * each;
    };
    pen.strokeStyle = colour.focus;
    pen.lineWidth = 2;
    const seenFrom = position(state.a), seenTo = position(state.b);
    pen.strokeRect(seenFrom + 1, 1, Math.max(seenTo - seenFrom - 2, 2), 50);
    pen.lineWidth = 1;
  };
  const isVisible = (node) => { const box = node.getBoundingClientRect(); return box.bottom > -50 && box.top < window.innerHeight + 50; };
  let waiting = false;
  const draw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      drawAxis();
      drawStrip();
      ranks.forEach((rank) => { if (isVisible(rank.canvas)) drawRank(rank); });
      // A sliver at the edge of the view is not what somebody looks at.
      const enough = (one) => 0.1 * Math.min(state.b - state.a, one[1] - one[0]);
      const seen = data.steps ? ranks[0].windows.map((one, index) => [one, index + 1]).filter(([one]) => Math.min(one[1], state.b) - Math.max(one[0], state.a) > enough(one)) : [];
      byId("in-view").textContent = seen.length === 0 ? "" : seen.length === 1 ? `step ${seen[0][1]}` : `steps ${seen[0][1]}–${seen[seen.length - 1][1]}`;
      byId("in").disabled = state.b - state.a <= 21;
      byId("out").disabled = state.a <= 0 && state.b >= end;
      showSpanTable();
    });
  };

  // ---- moving
  const look = (from, to) => {
    const wide = clamp(to - from, 20, end);
    const start = clamp((from + to) / 2 - wide / 2, 0, end - wide);
    state.a = start;
    state.b = start + wide;
    draw();
  };
  const zoom = (times, at = (state.a + state.b) / 2) => {
    const wide = clamp((state.b - state.a) * times, 20, end), part = (at - state.a) / (state.b - state.a);
    const start = clamp(at - part * wide, 0, end - wide);
    state.a = start; state.b = start + wide;
    draw();
  };
  const extent = (first, last) => {
    const from = Math.min(...ranks.map((rank) => rank.windows[first - 1][0])), to = Math.max(...ranks.map((rank) => rank.windows[last - 1][1]));
    const margin = (to - from) * 0.015;
    return [from - margin, to + margin];
  };
  const choose = (first, last, follow = true) => {
    if (!Number.isFinite(first) || !Number.isFinite(last)) { showFigures(); return; }
    state.first = clamp(Math.round(Math.min(first, last)), 1, stepCount);
    state.last = clamp(Math.round(Math.max(first, last)), 1, stepCount);
    showFigures();
    if (follow) look(...extent(state.first, state.last)); else draw();
  };
  const neighbour = (by) => {
    const middle = (state.a + state.b) / 2, windows = ranks[0].windows;
    let at = windows.findIndex(([, to]) => to > middle);
    if (at < 0) at = windows.length - 1;
    const next = clamp(at + by, 0, stepCount - 1);
    look(...extent(next + 1, next + 1));
  };

  // ---- the parts of the page
  const build = () => {
    data.about.forEach(([key, value]) => { const item = make("li", `${key} `); item.append(make("b", value)); byId("about").append(item); });
    data.notes.forEach((note) => byId("notes").append(make("li", note)));
    byId("notes").hidden = data.notes.length === 0;
    [...KINDS.map((kind) => [kind, kind === "other" ? "other operations" : kind]), ["exposed", "waiting for communication"]].forEach(([kind, text]) => {
      const item = make("li"); item.append(make("i", "", kind), text); byId("legend").append(item);
    });
    byId("of-steps").textContent = `of ${stepCount}`;
    byId("choosing").hidden = !data.steps;
    ["earlier", "later", "in-view"].forEach((id) => { byId(id).hidden = !data.steps; });
    for (const id of ["first", "last"]) byId(id).max = stepCount;
    ranks.forEach((rank) => {
      let top = 3;
      rank.lanes = data.lanes.map((name) => {
        const rows = rank.rows.filter((one) => one.lane === name);
        const lane = { name, top, height: Math.max(rows.length, 1) * (ROW + GAP) - GAP };
        rows.forEach((one, index) => { one.top = top + index * (ROW + GAP); });
        top += lane.height + LANE_GAP + 2;
        return lane;
      });
      rank.waits.forEach((one) => { one.top = rank.lanes[0].top; });
      rank.height = top + 1;
      const section = make("section", undefined, "rank"), heading = make("h3", `Rank ${rank.rank}`);
      rank.part = make("span", "", "part");
      heading.append(make("span", rank.host), rank.part);
      rank.canvas = make("canvas");
      rank.canvas.setAttribute("role", "img");
      rank.canvas.setAttribute("aria-label", `What rank ${rank.rank} did; the table of spans below says the same in words.`);
      rank.canvas.style.height = `${rank.height}px`;
      section.append(heading, rank.canvas);
      byId("lanes").append(section);
    });
  };
  const timeAt = (canvas, clientX) => {
    const box = canvas.getBoundingClientRect();
    return timeOf(clientX - box.left, box.width);
  };
  const hit = (rank, event) => {
    const box = rank.canvas.getBoundingClientRect(), y = event.clientY - box.top;
    if (event.clientX - box.left < gutter()) return null;
    const time = timeAt(rank.canvas, event.clientX), slack = (2 * (state.b - state.a)) / box.width;
    // Waits are drawn over what they are part of, so they are found first.
    for (const one of [...rank.waits, ...rank.rows]) {
      if (y < one.top - 1 || y > one.top + ROW + 1) continue;
      const at = firstEndingAfter(one, time - slack);
      if (at < one.start.length && one.start[at] <= time + slack) return { rank, one, at };
    }
    return null;
  };
  const tip = byId("tip");
  const showTip = (event) => {
    if (!state.hover) { tip.hidden = true; return; }
    const { rank, one, at } = state.hover;
    const from = one.start[at], to = from + one.span[at], lines = [];
    lines.push(make("b", `${data.names[one.name[at]]} · ${ms(one.span[at])} ms`));
    lines.push(make("div", `rank ${rank.rank}, ${one.lane}, at ${ms(from)} ms`));
    if (one.lane === "trainer") {
      const open = overlap(rank.exposed, from, to);
      if (open > 0) lines.push(make("div", `exposed: ${ms(open)} ms of it`));
    }
    detailsOf(one, at).forEach(([key, value]) => lines.push(make("div", `${key}: ${value}`)));
    if (one.thread[at] >= 0) lines.push(make("div", `thread: ${data.threads[one.thread[at]]}`));
    tip.replaceChildren(...lines);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${clamp(event.clientX + 14, 6, window.innerWidth - box.width - 6)}px`;
    tip.style.top = `${event.clientY + 18 + box.height > window.innerHeight ? event.clientY - box.height - 12 : event.clientY + 18}px`;
  };
  const listen = () => {
    const fingers = new Map();
    ranks.forEach((rank) => {
      const canvas = rank.canvas;
      canvas.addEventListener("wheel", (event) => {
        event.preventDefault();
        const wide = state.b - state.a;
        if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
          const by = ((event.deltaX || event.deltaY) / canvas.clientWidth) * wide;
          look(state.a + by, state.b + by);
        } else zoom(Math.exp(clamp(event.deltaY, -200, 200) * 0.0022), timeAt(canvas, event.clientX));
      }, { passive: false });
      canvas.addEventListener("dblclick", (event) => zoom(0.4, timeAt(canvas, event.clientX)));
      canvas.addEventListener("pointerdown", (event) => {
        fingers.set(event.pointerId, event.clientX);
        canvas.setPointerCapture(event.pointerId);
        canvas.classList.add("held");
      });
      canvas.addEventListener("pointermove", (event) => {
        if (!fingers.has(event.pointerId)) {
          const found = hit(rank, event), before = state.hover;
          state.hover = found;
          showTip(event);
          if ((found && found.at) !== (before && before.at) || (found && found.one) !== (before && before.one)) draw();
          return;
        }
        const perPixel = (state.b - state.a) / (canvas.clientWidth - gutter());
        const before = [...fingers.values()], moved = event.clientX - fingers.get(event.pointerId);
        fingers.set(event.pointerId, event.clientX);
        const after = [...fingers.values()];
        if (fingers.size >= 2) {
          const apart = Math.max(8, Math.abs(after[0] - after[1])), was = Math.max(8, Math.abs(before[0] - before[1]));
          zoom(was / apart, timeAt(canvas, (after[0] + after[1]) / 2));
        } else look(state.a - moved * perPixel, state.b - moved * perPixel);
        tip.hidden = true;
      });
      const release = (event) => { fingers.delete(event.pointerId); canvas.classList.remove("held"); };
      canvas.addEventListener("pointerup", (event) => { release(event); if (event.pointerType === "touch") { state.hover = hit(rank, event); showTip(event); draw(); } });
      canvas.addEventListener("pointercancel", release);
      canvas.addEventListener("pointerleave", () => { state.hover = null; tip.hidden = true; draw(); });
    });
    const strip = byId("strip");
    const stepAt = (event) => { const box = strip.getBoundingClientRect(); return clamp(Math.floor(((event.clientX - box.left) / box.width) * stepCount) + 1, 1, stepCount); };
    let begun = null;
    strip.addEventListener("pointerdown", (event) => { begun = stepAt(event); strip.setPointerCapture(event.pointerId); choose(begun, begun, false); });
    strip.addEventListener("pointermove", (event) => { if (begun !== null) choose(begun, stepAt(event), false); });
    strip.addEventListener("pointerup", (event) => { if (begun !== null) choose(begun, stepAt(event)); begun = null; });
    strip.addEventListener("pointercancel", () => { begun = null; });
    for (const id of ["first", "last"]) byId(id).addEventListener("change", () => choose(Number.parseInt(byId("first").value, 10), Number.parseInt(byId("last").value, 10)));
    byId("all-steps").addEventListener("click", () => choose(Math.min(2, stepCount), stepCount));
    byId("earlier").addEventListener("click", () => neighbour(-1));
    byId("later").addEventListener("click", () => neighbour(1));
    byId("in").addEventListener("click", () => zoom(0.5));
    byId("out").addEventListener("click", () => zoom(2));
    byId("fit").addEventListener("click", () => look(...extent(state.first, state.last)));
    byId("lanes").addEventListener("keydown", (event) => {
      const wide = state.b - state.a;
      const keys = {
        ArrowLeft: () => look(state.a - wide / 6, state.b - wide / 6), ArrowRight: () => look(state.a + wide / 6, state.b + wide / 6),
        "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => look(...extent(state.first, state.last)),
      };
      if (keys[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); keys[event.key](); }
    });
    byId("steps-table").addEventListener("toggle", showStepTable);
    byId("spans-table").addEventListener("toggle", showSpanTable);
    const renew = () => { readColours(); draw(); };
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renew);
    window.addEventListener("resize", renew);
    window.addEventListener("scroll", draw, { passive: true });
  };

  build();
  readColours();
  showFigures();
  listen();
  // The whole of a long run would be a smear: begin with the first steps of the range.
  look(...extent(state.first, Math.min(state.last, state.first + 1)));
})();
