
"use strict";
// Sections are independent. What a section needs is read when it is first touched, so that a page of a thousand pairs
// opens as fast as its text. The data hold numbers only; words are taken from the text, and put back as text.
(() => {
  const sides = ["source", "target"];
  const known = new WeakMap(); // section -> its state
  let shown = null; // { state, word } whose partners are lit
  let kept = false; // lit until released

  function stateOf(section) {
    let state = known.get(section);
    if (state) return state;
    const data = JSON.parse(section.querySelector("script[type='application/json']").textContent);
    const words = sides.map((side) => [...section.querySelectorAll(`.text.${side} .word`)]);
    state = {
      section, words, place: new Map(), start: data.threshold, threshold: data.threshold, alone: data.alone,
      // Sorted by source word, then target word: the order of the list.
      pairs: data.pairs.map(([i, j, share, level = share]) => ({ ends: [i, j], share, level })),
      list: section.querySelector("details.list"), listed: data.threshold, cells: null,
    };
    words.forEach((texts, side) => texts.forEach((word, k) => {
      word.tabIndex = word.tabIndex === 0 ? 0 : -1;
      state.place.set(word, { side, k });
    }));
    known.set(section, state);
    return state;
  }

  const linksOf = (state) => state.pairs.filter((pair) => pair.level >= state.threshold);
  const element = (name, text) => Object.assign(document.createElement(name), { textContent: text });

  // Lighting ------------------------------------------------------------------------------------------------------

  function dark() {
    if (!shown) return;
    for (const word of shown.lit) {
      word.classList.remove("here", "lit", ...Array.from({ length: 10 }, (_, k) => `s${k + 1}`));
      word.removeAttribute("data-share");
    }
    shown.state.section.querySelector(".status").replaceChildren();
    shown = null;
    kept = false;
  }

  function light(state, word) {
    const { side, k } = state.place.get(word);
    const partners = linksOf(state).filter((pair) => pair.ends[side] === k).sort((a, b) => b.share - a.share);
    const keep = kept && shown && shown.word === word;
    dark();
    kept = Boolean(keep);
    word.classList.add("here");
    shown = { state, word, lit: [word] };
    const status = state.section.querySelector(".status");
    status.append(element("bdi", word.textContent), ` (${k} in the ${sides[side]})`);
    if (!partners.length) status.append(` stays alone: ${state.alone[side][k].toFixed(2)} of it has no partner`);
    partners.forEach(({ ends, share }, position) => {
      const partner = state.words[1 - side][ends[1 - side]];
      partner.classList.add("lit");
      const step = Math.round(10 * share);
      if (step) partner.classList.add(`s${step}`);
      partner.dataset.share = share.toFixed(2);
      shown.lit.push(partner);
      status.append(position ? ", " : " \u2013 ", element("bdi", partner.textContent), ` (${ends[1 - side]}) ${share.toFixed(2)}`);
    });
  }

  // Long texts scroll on their own: the first partner is brought into view, without moving the page.
  function bring(word) {
    const box = word.closest(".text");
    const inner = word.getBoundingClientRect();
    const outer = box.getBoundingClientRect();
    if (box.scrollHeight <= box.clientHeight || (inner.top >= outer.top + 20 && inner.bottom <= outer.bottom)) return;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    box.scrollBy({ top: inner.top - outer.top - box.clientHeight / 2, behavior: still ? "auto" : "smooth" });
  }

  function touch(word, bringing) {
    light(stateOf(word.closest("section")), word);
    if (bringing && shown.lit.length > 1) bring(shown.lit[1]);
  }

  // The threshold -------------------------------------------------------------------------------------------------

  function update(state, threshold) {
    state.threshold = threshold;
    const links = linksOf(state);
    const linked = sides.map((_, side) => new Set(links.map((pair) => pair.ends[side])));
    state.words.forEach((texts, side) => {
      texts.forEach((word, k) => word.classList.toggle("alone", !linked[side].has(k)));
      count(state, sides[side], texts.length - linked[side].size);
    });
    count(state, "links", links.length);
    const { section } = state;
    section.querySelector("output").textContent = threshold.toFixed(2);
    section.querySelector(".controls button").disabled = threshold === state.start;
    frame(state, links);
    relist(state);
    if (shown && shown.state === state) light(state, shown.word);
  }

  function count(state, name, number) {
    state.section.querySelector(`[data-count='${name}']`).textContent = number;
  }

  function frame(state, links) {
    const table = state.section.querySelector(".map");
    if (!table) return;
    state.cells ??= new Map(state.pairs.map((pair) => [pair, table.tBodies[0].rows[pair.ends[0]].cells[pair.ends[1] + 1]]));
    const framed = new Set(links);
    for (const [pair, cell] of state.cells) cell.classList.toggle("link", framed.has(pair));
  }

  function relist(state) {
    if (!state.list.open || state.listed === state.threshold) return;
    state.listed = state.threshold;
    const rows = linksOf(state).map(({ ends: [i, j], share }) => {
      const row = document.createElement("tr");
      const names = [state.words[0][i], state.words[1][j]].map((word) => {
        const cell = document.createElement("td");
        cell.append(element("bdi", word.textContent));
        return cell;
      });
      row.append(element("td", i), ...names, element("td", j), element("td", share.toFixed(2)));
      return row;
    });
    state.list.querySelector("tbody").replaceChildren(...rows);
  }

  // Pointer, keys -------------------------------------------------------------------------------------------------

  const wordAt = (event) => event.target.closest(".pair .word");

  document.addEventListener("pointerover", (event) => {
    const word = wordAt(event);
    if (kept) return;
    if (word) touch(word, false);
    else release();
  });
  document.addEventListener("focusin", (event) => {
    const word = wordAt(event);
    if (word && !kept) touch(word, true);
  });
  document.addEventListener("focusout", (event) => {
    if (wordAt(event) && !kept) dark();
  });
  document.addEventListener("click", (event) => {
    const word = wordAt(event);
    if (word) keep(word);
    else if (event.target.matches(".controls button")) reset(event.target);
    else if (!event.target.closest(".controls, summary")) dark();
  });

  // Away from all words, the one with the keyboard's focus is lit again.
  function release() {
    const focused = document.activeElement?.closest(".pair .word");
    if (!focused) dark();
    else if (shown?.word !== focused) touch(focused, false);
  }

  function keep(word) {
    const again = kept && shown.word === word;
    kept = false;
    if (again) return dark();
    touch(word, true);
    kept = true;
  }

  function move(word, by) {
    const state = stateOf(word.closest("section"));
    const { side, k } = state.place.get(word);
    const next = state.words[side][Math.min(Math.max(k + by, 0), state.words[side].length - 1)];
    kept = false;
    for (const other of state.words[side]) if (other.tabIndex === 0) other.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return dark();
    const word = wordAt(event);
    if (!word || event.ctrlKey || event.altKey || event.metaKey) return;
    const forward = getComputedStyle(word.closest(".text")).direction === "rtl" ? -1 : 1;
    const steps = { ArrowRight: forward, ArrowLeft: -forward, Home: -Infinity, End: Infinity };
    if (event.key in steps) move(word, steps[event.key]);
    else if (event.key === "Enter" || event.key === " ") keep(word);
    else return;
    event.preventDefault();
  });

  document.addEventListener("input", (event) => {
    if (event.target.matches(".threshold")) update(stateOf(event.target.closest("section")), event.target.valueAsNumber);
  });

  function reset(button) {
    const state = stateOf(button.closest("section"));
    state.section.querySelector(".threshold").value = state.start;
    update(state, state.start);
  }

  document.addEventListener("toggle", (event) => {
    if (event.target.matches("details.list") && event.target.open) relist(stateOf(event.target.closest("section")));
  }, true);

  document.documentElement.classList.add("js");
  for (const hidden of document.querySelectorAll(".hint, .controls")) hidden.hidden = false;
  for (const first of document.querySelectorAll(".pair .text .word:first-of-type")) first.tabIndex = 0;
})();
