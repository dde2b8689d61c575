// Keeps a page up to date: asks for it every two seconds, and changes what differs in the parts [data-live].
// Elements stay, so that focus, hover and scrolling do too. Nothing changes while text in such a part is
// selected, or the page is hidden; rows keep their order while the pointer or the focus is among them.
"use strict";

const INTERVAL_MS = 2000;
const PAUSE_MS_MAX = 15000;
const KEPT = new Set(["INPUT", "SELECT", "TEXTAREA"]); // a person may have filled them in

const state = document.getElementById("live-state");
const button = document.getElementById("live-stop");
let isStopped = false;
let failures = 0;
let timer = 0;
let isAsking = false;

function tell(text) {
  if (state.textContent !== text) state.textContent = text; // else screen readers would repeat it
}

function later(ms) {
  clearTimeout(timer);
  if (!isStopped && !document.hidden) timer = setTimeout(refresh, ms);
}

function hasSelection(part) {
  const selection = getSelection();
  return selection !== null && !selection.isCollapsed && part.contains(selection.anchorNode);
}

async function refresh() {
  if (isAsking) return;
  isAsking = true;
  try {
    const answer = await fetch(location.pathname + location.search, {
      headers: { "X-Carpool-Live": "1" },
      signal: AbortSignal.timeout(PAUSE_MS_MAX),
    });
    if (answer.status === 401) {
      tell("Signed out");
      document.getElementById("reload").hidden = false;
      isStopped = true;
      return;
    }
    if (answer.status === 404) {
      tell("Not there any more");
      return;
    }
    if (!answer.ok) throw new Error(String(answer.status));
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    failures = 0;
    if (!isStopped) update(page);
  } catch {
    failures += 1;
    if (failures > 1) tell("The console does not answer");
  } finally {
    isAsking = false;
    later(Math.min(PAUSE_MS_MAX, INTERVAL_MS * 2 ** Math.min(failures, 3)));
  }
}

function update(page) {
  let isHeld = false;
  document.title = page.title;
  for (const part of document.querySelectorAll("[data-live][id]")) {
    const found = page.getElementById(part.id);
    if (found === null) continue;
    if (hasSelection(part)) isHeld = true;
    else patch(part, found);
  }
  tell(isHeld ? "Held while text is selected" : "Live");
}

function patch(old, made) {
  for (const { name } of [...old.attributes]) {
    if (!made.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of made.attributes) {
    if (old.getAttribute(name) !== value && name !== "open") old.setAttribute(name, value);
  }
  if (KEPT.has(old.tagName)) return;
  const children = [...made.children];
  if (children.length > 0 && children.every((child) => child.hasAttribute("data-key"))) patchKeyed(old, children);
  else patchInOrder(old, made);
}

function patchKeyed(old, wanted) {
  const present = new Map([...old.children].map((child) => [child.getAttribute("data-key"), child]));
  const made = new Map(wanted.map((child) => [child.getAttribute("data-key"), child]));
  for (const [key, child] of present) if (!made.has(key)) child.remove();
  const staying = [...present.keys()].filter((key) => made.has(key));
  const isInUse = old.tagName === "TBODY" && (old.matches(":hover") || old.contains(document.activeElement));
  const order = isInUse ? [...staying, ...[...made.keys()].filter((key) => !present.has(key))] : [...made.keys()];
  let place = old.firstElementChild;
  for (const key of order) {
    const child = present.get(key);
    if (child === undefined || child.tagName !== made.get(key).tagName) {
      child?.remove();
      old.insertBefore(document.importNode(made.get(key), true), place);
      continue;
    }
    patch(child, made.get(key));
    if (child === place) place = place.nextElementSibling;
    else old.insertBefore(child, place);
  }
}

function patchInOrder(old, made) {
  const present = [...old.childNodes];
  [...made.childNodes].forEach((node, at) => {
    const child = present[at];
    if (child === undefined) old.append(document.importNode(node, true));
    else if (child.nodeType !== node.nodeType || child.nodeName !== node.nodeName) {
      child.replaceWith(document.importNode(node, true));
    } else if (node.nodeType === Node.ELEMENT_NODE) patch(child, node);
    else if (child.nodeValue !== node.nodeValue) child.nodeValue = node.nodeValue;
  });
  for (const child of present.slice(made.childNodes.length)) child.remove();
}

if (document.querySelector("[data-live]") !== null) {
  button.hidden = false;
  document.getElementById("reload").hidden = true;
  tell("Live");
  button.addEventListener("click", () => {
    isStopped = !isStopped;
    button.textContent = isStopped ? "Update this page" : "Stop updates of this page";
    tell(isStopped ? "Not updated" : "Live");
    later(0);
  });
  document.addEventListener("visibilitychange", () => later(0));
  later(INTERVAL_MS);
} else {
  document.getElementById("reload").hidden = true;
}
