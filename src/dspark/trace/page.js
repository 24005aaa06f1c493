"use strict";
(() => {
  const traces = JSON.parse(document.getElementById("data").textContent).traces;
  const tip = document.getElementById("tip");
  const TITLES = {
    accepted: "Accepted draft", recovered: "Recovered: the target's own token", bonus: "Bonus: the target's own token",
    first: "First token, from the prompt's pass",
  };

  // --- what is on the page, by number: trace, its tokens, and each token's round and place in it ---
  const views = [...document.querySelectorAll(".trace")].map((article, index) => {
    const view = { article, data: traces[index], tokens: [], rounds: [...article.querySelectorAll(".text .round")] };
    view.rounds.forEach((round, number) => {
      [...round.querySelectorAll(".t")].forEach((element, place) => {
        view.tokens.push({ element, round: number, place, kind: element.classList[1] });
      });
    });
    view.index = new Map(view.tokens.map((token, at) => [token.element, at]));
    view.current = 0;
    if (view.tokens.length) view.tokens[0].element.tabIndex = 0;
    return view;
  });
  const viewOf = (element) => views[Number(element.closest(".trace").dataset.trace)];

  // --- small builders; texts are only ever set as text ---
  const make = (name, text, className) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };
  const percent = (p) => (p >= 0.9995 ? "100%" : p >= 0.1 ? (100 * p).toFixed(1) + "%" :
    p >= 0.001 ? (100 * p).toFixed(2) + "%" : p > 0 ? "<0.1%" : "0%");
  const piece = (view, id) => make("span", view.data.shown[id], "piece");
  const line = (...parts) => {
    const p = make("p");
    parts.forEach((part) => p.append(part));
    return p;
  };
  const table = (head, rows, className) => {
    const whole = make("table", undefined, className);
    const top = whole.createTHead().insertRow();
    head.forEach((text) => { const cell = make("th", text); cell.scope = "col"; top.append(cell); });
    const body = whole.createTBody();
    rows.forEach((cells) => { const row = body.insertRow(); cells.forEach((cell) => row.insertCell().append(cell)); });
    return whole;
  };

  // --- the tip ---
  const drafterSays = (round, slot) => {
    let text = `drafter ${percent(round.base[slot])} before its head, ${percent(round.head[slot])} after`;
    if (round.drawn) text += `, drawn with ${percent(round.drawn[slot])}`;
    return text;
  };
  const confidenceSays = (round, slot) => round.confidence &&
    `confidence ${percent(round.confidence[slot])}, survival ${percent(round.survival[slot])}`;

  const acceptedLines = (view, round, slot) => [
    line(`target ${percent(round.probs[slot])}, ${drafterSays(round, slot)}`),
    ...(round.confidence ? [line(confidenceSays(round, slot))] : []),
  ];
  const rejectedLines = (view, round) => {
    const slot = round.accepted, rejection = round.rejection;
    const cells = (law, at) => {
      const cell = make("span");
      if (law[at]) cell.append(piece(view, law[at][0]), " " + percent(law[at][1]));
      return cell;
    };
    const laws = [rejection.target, rejection.base, rejection.head];
    const rows = [...Array(Math.max(...laws.map((law) => law.length))).keys()];
    let chance = "";
    if (round.drawn) {
      const stays = round.drawn[slot] > 0 ? Math.min(1, rejection.prob / round.drawn[slot]) : 1;
      chance = `; it had a chance of ${percent(stays)} to stay`;
    }
    return [
      line("Refused draft ", piece(view, round.drafts[slot]), `: target ${percent(rejection.prob)}, ` +
        drafterSays(round, slot) + chance),
      ...(round.confidence ? [line(confidenceSays(round, slot))] : []),
      table(["target", "drafter before head", "after head"], rows.map((at) => laws.map((law) => cells(law, at)))),
    ];
  };

  const fillTip = (view, token, at) => {
    const number = token.round, round = number ? view.data.rounds[number - 1] : null;
    const id = round ? round.emitted[token.place] : view.data.first[0];
    const where = round ? `round ${number}, token ${token.place + 1} of ${round.emitted.length}` : "before the rounds";
    const heading = line(make("strong", TITLES[token.kind]), " ", piece(view, id));
    const parts = [heading, line(`${where}; position ${view.data.prompt + at}, id ${id}`)];
    if (!round) parts.push(line(`target ${percent(view.data.first[1])}`));
    else if (token.kind === "accepted") parts.push(...acceptedLines(view, round, token.place));
    else {
      parts.push(line(`target ${percent(round.probs[token.place])}`));
      if (token.kind === "recovered") parts.push(...rejectedLines(view, round));
      else parts.push(line(round.verified ? `all ${round.verified} verified drafts accepted` : "no draft was verified"));
    }
    tip.replaceChildren(...parts);
  };
  const placeTip = (element) => {
    const boxes = element.getClientRects(), box = boxes[boxes.length - 1], gap = 8;
    tip.style.removeProperty("max-height");
    const width = tip.offsetWidth, height = tip.offsetHeight, room = document.documentElement;
    const below = room.clientHeight - box.bottom - 2 * gap, above = boxes[0].top - 2 * gap;
    const isBelow = height <= below || below >= above;
    const fits = Math.max(0, Math.min(height, isBelow ? below : above)); // cut rather than over its token
    tip.style.setProperty("max-height", fits + "px");
    tip.style.setProperty("left", Math.max(gap, Math.min(box.left, room.clientWidth - width - gap)) + "px");
    tip.style.setProperty("top", (isBelow ? box.bottom + gap : boxes[0].top - gap - fits) + "px");
  };
  let told = null;
  const showTip = (element) => {
    const view = viewOf(element), at = view.index.get(element);
    if (told !== element) fillTip(view, view.tokens[at], at);
    told = element;
    tip.hidden = false;
    placeTip(element);
  };
  const hideTip = () => { tip.hidden = true; };
  const tokenAt = (target) => (target instanceof Element ? target.closest(".text .t") : null);
  const focused = () => tokenAt(document.activeElement);
  let pointed = null; // the token under the pointer; null once the keyboard or a click has chosen one
  let isDismissed = false; // by Escape, until another token is pointed at or chosen
  const settle = () => {
    const element = pointed || focused();
    if (element && !isDismissed) showTip(element); else hideTip();
  };

  // --- the round of the chosen token ---
  const showRound = (view, number) => {
    const box = view.article.querySelector(".chosen"), now = view.article.querySelector(".now");
    if (box.dataset.round === String(number)) return;
    box.dataset.round = String(number);
    if (now) {
      now.setAttribute("visibility", number ? "visible" : "hidden");
      now.setAttribute("x", (number - 1) * now.getAttribute("width"));
    }
    if (!number) {
      box.replaceChildren(make("h3", "Round"), line("The prompt's own pass gave this token; the rounds come after it."));
      return;
    }
    const round = view.data.rounds[number - 1], outcomes = view.data.outcomes[number - 1];
    const parts = [make("h3", view.rounds[number].getAttribute("aria-label"))];
    parts.push(line(`anchor at position ${view.data.prompt + round.anchor}; ` +
      `${round.drafts.length} drafted, ${round.verified} verified, ${round.accepted} accepted`));
    if (round.drafts.length) {
      const own = (values, slot) => (values ? percent(values[slot]) : "–");
      const target = (slot) => (slot < round.accepted ? percent(round.probs[slot]) :
        slot === round.accepted && round.rejection ? percent(round.rejection.prob) : "–");
      const rows = round.drafts.map((id, slot) => [
        String(slot + 1), piece(view, id), outcomes[slot], own(round.confidence, slot), own(round.survival, slot),
        percent(round.base[slot]), percent(round.head[slot]), target(slot),
      ]);
      const head = ["slot", "draft", "outcome", "confidence", "survival", "drafter before head", "after head",
        "target"];
      const scroller = make("div", undefined, "scroller");
      scroller.tabIndex = 0;
      scroller.setAttribute("role", "group");
      scroller.setAttribute("aria-label", "Drafts of the round");
      scroller.append(table(head, rows, "slots"));
      parts.push(scroller);
    }
    const total = round.steps.reduce((sum, seconds) => sum + seconds, 0);
    const steps = view.data.steps.map((name, at) => `${name} ${(1000 * round.steps[at]).toFixed(2)}`);
    parts.push(line(`${(1000 * total).toFixed(2)} ms: ${steps.join(", ")}`));
    box.replaceChildren(...parts);
  };

  // --- choosing ---
  const choose = (view, at) => {
    const before = view.tokens[view.current], token = view.tokens[at];
    before.element.tabIndex = -1;
    before.element.setAttribute("aria-selected", "false");
    before.element.removeAttribute("aria-describedby");
    view.current = at;
    token.element.tabIndex = 0;
    token.element.setAttribute("aria-selected", "true");
    token.element.setAttribute("aria-describedby", "tip");
    views.forEach((other) => {
      if (other.same) other.same.classList.remove("same");
      other.same = other !== view && other.tokens[at] ? other.tokens[at].element : null;
      if (other.same) other.same.classList.add("same");
    });
    showRound(view, token.round);
  };
  const go = (view, at) => {
    if (at === undefined || at < 0) return;
    view.tokens[at].element.focus({ preventScroll: true });
    view.tokens[at].element.scrollIntoView({ block: "nearest", inline: "nearest" });
    settle();
  };
  const isSeen = (token) => !token.element.classList.contains("dim");
  const next = (view, step, wanted) => {
    for (let at = view.current + step; at >= 0 && at < view.tokens.length; at += step) {
      if (isSeen(view.tokens[at]) && wanted(view.tokens[at])) return at;
    }
    return -1;
  };
  const firstOf = (view, number) => view.tokens.findIndex((token) => token.round === number && isSeen(token));
  const keys = {
    ArrowRight: (view) => next(view, 1, () => true),
    ArrowLeft: (view) => next(view, -1, () => true),
    ArrowDown: (view, round) => next(view, 1, (token) => token.round > round),
    ArrowUp: (view, round) => {
      const at = next(view, -1, (token) => token.round < round);
      return at < 0 ? at : firstOf(view, view.tokens[at].round);
    },
    Home: (view) => view.tokens.findIndex(isSeen),
    End: (view) => view.tokens.findLastIndex(isSeen),
  };

  // --- one listener per kind of event, for all tokens ---
  document.addEventListener("pointerover", (event) => {
    pointed = tokenAt(event.target);
    if (pointed) isDismissed = false;
    settle();
  });
  document.documentElement.addEventListener("pointerleave", () => { pointed = null; settle(); });
  document.addEventListener("focusin", (event) => {
    const element = tokenAt(event.target);
    pointed = null;
    isDismissed = false;
    if (element) {
      const view = viewOf(element);
      choose(view, view.index.get(element));
    }
    settle();
  });
  document.addEventListener("focusout", hideTip);
  document.addEventListener("keydown", (event) => {
    const element = tokenAt(event.target);
    if (event.key === "Escape") { isDismissed = true; hideTip(); }
    if (!element || !(event.key in keys) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const view = viewOf(element);
    go(view, keys[event.key](view, view.tokens[view.current].round));
  });
  document.addEventListener("click", (event) => {
    const strip = event.target instanceof Element ? event.target.closest(".strip") : null;
    if (!strip) return;
    const view = viewOf(strip), box = strip.getBoundingClientRect(), count = view.data.rounds.length;
    const number = 1 + Math.min(count - 1, Math.floor(((event.clientX - box.left) / box.width) * count));
    go(view, view.tokens.findIndex((token) => token.round === number));
  });
  document.addEventListener("scroll", () => { if (!tip.hidden) settle(); }, { passive: true, capture: true });
  window.addEventListener("resize", () => { if (!tip.hidden) settle(); });

  // --- filters ---
  const drafted = (test) => (round) => round.drafts.length > 0 && test(round);
  const ROUNDS = {
    all: () => true,
    none: drafted((round) => round.verified > 0 && round.accepted === 0),
    whole: drafted((round) => round.verified > 0 && round.accepted === round.verified),
    proud: drafted((round) => round.rejection !== null && round.survival !== null && round.survival[round.accepted] >= 0.5),
    shy: drafted((round) => round.accepted > 0 && round.survival !== null && round.survival[round.accepted - 1] < 0.5),
    cut: drafted((round) => round.verified < round.drafts.length),
    plain: (round) => round.drafts.length === 0,
  };
  const filter = () => {
    const kinds = new Set([...document.querySelectorAll("input[name=kind]:checked")].map((box) => box.value));
    const rule = document.getElementById("rounds").value;
    let seen = 0, all = 0;
    views.forEach((view) => {
      const fits = [rule === "all", ...view.data.rounds.map(ROUNDS[rule])];
      view.tokens.forEach((token) => {
        const isFit = kinds.has(token.kind) && fits[token.round];
        token.element.classList.toggle("dim", !isFit);
        seen += isFit;
      });
      all += view.tokens.length;
    });
    document.getElementById("matches").textContent = `${seen.toLocaleString("en")} of ${all.toLocaleString("en")} tokens`;
  };
  document.querySelector(".controls").addEventListener("change", (event) => {
    if (event.target.id === "refused") document.body.classList.toggle("with-refused", event.target.checked);
    else filter();
  });
  filter();
})();
