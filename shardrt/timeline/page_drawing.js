// Second part of the page's script: lanes, time axis and the strip of steps, on canvases.
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
  if (name === "wait") return "idle";
  if (lane !== "trainer") return lane;
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
  rank.rows.concat(rank.waits).forEach((one) => drawBars(pen, rank, one, one.top, width));
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
    const enough = (one) => 0.15 * Math.min(state.b - state.a, one[1] - one[0]);
    const seen = data.steps ? ranks[0].windows.map((one, index) => [one, index + 1]).filter(([one]) => Math.min(one[1], state.b) - Math.max(one[0], state.a) > enough(one)) : [];
    byId("in-view").textContent = seen.length === 0 ? "" : seen.length === 1 ? `step ${seen[0][1]}` : `steps ${seen[0][1]}–${seen[seen.length - 1][1]}`;
    byId("in").disabled = state.b - state.a <= 21;
    byId("out").disabled = state.a <= 0 && state.b >= end;
    showSpanTable();
  });
};
