// Last part of the page's script: what is looked at, the elements, and what happens when somebody touches them.
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
  const margin = (to - from) * 0.01;
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
