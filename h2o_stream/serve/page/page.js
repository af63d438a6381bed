// The page: the list of conversations, the messages of one, and the slots of its cache, as the server reports them.
"use strict";

const $ = name => document.getElementById(name), number = value => Math.round(value).toLocaleString("en");
const USES = { sinks: "sinks", pinned: "pinned", heavy: "heavy", recent: "recent", free: "empty" };
const key = new URLSearchParams(location.hash.slice(1)).get("key");
const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
let model = null, running = null;

// the slots of the cache

function showSlots(slots) {
  if (!slots) return;
  $("slots").replaceChildren(...Object.keys(USES).map((name, index) => {
    const part = $("slots").children[index] || element("div");
    part.className = `slots ${name}${slots[name] ? "" : " none"}`;
    part.style.flexGrow = slots[name];
    part.title = `${USES[name]}: ${number(slots[name])} slots`;
    return part;
  }));
  $("slots").setAttribute("aria-valuemax", slots.window);
  $("slots").setAttribute("aria-valuenow", slots.window - slots.free);
  $("legend").replaceChildren(...Object.keys(USES).map(name => {
    const line = element("span");
    line.append(element("i", `slots ${name}`), `${USES[name]} ${number(slots[name])}`);
    return line;
  }));
  $("numbers").textContent = slots.seen
    ? `${number(slots.seen)} seen · ${number(slots.evicted)} evicted · ${(slots.nbytes / 2 ** 20).toFixed(1)} MiB`
      + (slots.speed ? ` · ${number(slots.speed)} tok/s` : "")
    : `${number(slots.window)} slots`;
}

function noSlots() {
  return model && { sinks: 0, pinned: 0, heavy: 0, recent: 0, free: model.h2o.window, window: model.h2o.window, seen: 0 };
}

// the list

function drawList() {
  $("chats").replaceChildren(...chats.filter(each => each.messages.length || each === chat).map(each => {
    const line = element("li", each === chat ? "current" : "");
    const name = button(titleOf(each), "name", () => show(each));
    name.title = titleOf(each);
    if (each === chat) name.setAttribute("aria-current", "true");
    const gone = button("×", "quiet", () => {
      if (!confirm(`Delete “${titleOf(each)}” from this browser?`)) return;
      if (each === chat) stop();
      remove(each);
      show(chat);
    });
    gone.setAttribute("aria-label", `Delete ${titleOf(each)}`);
    line.append(name, gone);
    return line;
  }));
}

function show(shown) {
  if (shown !== chat) stop();
  chat = shown;
  sessionStorage.setItem("h2o-current", chat.id);
  draw();
  openList(false);
  $("text").focus();
}

function openList(opened) {
  document.body.classList.toggle("opened", opened);
  $("menu").setAttribute("aria-expanded", opened);
}

// the messages

function draw() {
  drawList();
  showSlots(chat.slots || noSlots());
  $("log").replaceChildren(...chat.messages.map(drawn));
  if (!chat.messages.length) {
    $("log").append(element("div", "empty", "Talk for as long as you like. What is in the cache is shown above."));
  } else if (chat.messages.at(-1).role === "user") {
    const again = element("div", "tools open");
    again.append(button("Answer", "quiet", () => reply()));
    $("log").append(again);
  }
  scrollTo(0, document.body.scrollHeight);
}

function drawn(message, index) {
  const turn = element("div", `turn ${message.role}`), tools = element("div", "tools");
  if (message.role === "user") {
    turn.append(element("div", "said", message.content), tools);
    tools.append(button("Edit", "quiet", () => edit(turn, index)));
    return turn;
  }
  fill(turn, version(message));
  const last = index === chat.messages.length - 1;
  if (last && message.versions.length > 1) {
    const step = by => () => { message.at += by; save(); draw(); };
    const [back, on] = [button("‹", "quiet", step(-1)), button("›", "quiet", step(1))];
    back.disabled = message.at === 0;
    on.disabled = message.at === message.versions.length - 1;
    tools.append(back, element("span", "", `${message.at + 1} of ${message.versions.length}`), on);
  }
  tools.append(button("Copy", "quiet copy-all"));
  if (last) tools.append(button("Regenerate", "quiet", () => reply(message)));
  turn.append(tools);
  return turn;
}

/** Show a version of a reply in its turn. */
function fill(turn, { content, thinking }) {
  let thoughts = turn.querySelector("details");
  if (thinking && !thoughts) {
    thoughts = element("details");
    thoughts.append(element("summary", "", "Thinking"), element("div"));
    turn.prepend(thoughts);
  }
  if (thinking) thoughts.lastChild.textContent = thinking;
  if (!turn.querySelector(".text")) turn.append(element("div", "text"));
  turn.querySelector(".text").replaceChildren(rendered(content));
}

/** Change a message of the user: the chat goes on from there as another one, and the old one stays in the list. */
function edit(turn, index) {
  const area = element("textarea", "", chat.messages[index].content), tools = element("div", "tools open");
  const send = () => {
    const text = area.value.trim();
    if (!text) return;
    const before = structuredClone(chat.messages.slice(0, index));
    show(begun([...before, userMessage(text)]));
    reply();
  };
  tools.append(button("Cancel", "quiet", draw), button("Send", "quiet", send));
  area.onkeydown = event => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); }
    if (event.key === "Escape") { event.stopPropagation(); draw(); }
  };
  area.setAttribute("aria-label", "Edited message");
  turn.classList.add("edited");
  turn.replaceChildren(area, tools);
  area.focus();
}

// replies

async function refused(answer) {
  const error = await answer.json().then(body => body.error.message, () => answer.statusText);
  return new Error(answer.status === 401 ? `${error}; open this page with #key=... in its address` : error);
}

/** The chunks of the answer to the first of these requests whose previous reply the server still knows, and keeps as
 * it keeps new ones: with another window or policy, it has to read all of it again. */
async function* chunks(requests, signal) {
  let answer;
  for (const request of requests) {
    const body = JSON.stringify({ ...request, stream: true, stream_options: { include_slots: true } });
    answer = await fetch("/v1/chat/completions", { method: "POST", headers, body, signal });
    if (answer.status !== 404 && answer.status !== 400) break;
  }
  if (!answer.ok) throw await refused(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part; !(part = await reader.read()).done;) {
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const data of events.map(event => event.replace(/^data: /, ""))) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

/** Ask for the reply to the chat, or for another version of its last one, and show it as it comes. */
async function reply(again = null) {
  stop();
  const asking = chat, message = again || replyMessage(), control = running = new AbortController();
  const count = again ? -1 : undefined, before = message.at;
  const requests = [sent(count), sent(count, true)];  // the second one, if the server does not know the first any more
  if (again) message.at = message.versions.push({ content: "", thinking: "" }) - 1;
  else chat.messages.push(message);
  draw();
  const turn = $("log").lastChild, now = version(message);
  turn.classList.add("busy");
  $("log").setAttribute("aria-busy", "true");
  $("send").textContent = "Stop";
  let tokens = 0, start = 0, due = false, failed = null;
  const update = () => {
    due = false;
    if (!turn.isConnected) return;
    const near = innerHeight + scrollY > document.body.scrollHeight - 80;
    fill(turn, now);
    showSlots(asking.slots);
    if (near) scrollTo(0, document.body.scrollHeight);
  };
  try {
    for await (const chunk of chunks(requests, control.signal)) {
      now.id = chunk.id;
      const delta = chunk.choices[0]?.delta || {};
      now.thinking += delta.reasoning_content || "";
      now.content += delta.content || "";
      if (chunk.h2o?.slots) {
        const taken = performance.now() - (start ||= performance.now());
        asking.slots = { ...chunk.h2o.slots, speed: tokens > 8 ? 1000 * tokens / taken : 0 };
        tokens += 1;
      }
      if (!due) due = requestAnimationFrame(update);
    }
  } catch (error) {
    if (error.name !== "AbortError") failed = error;
  }
  if (!now.content && !now.thinking) {  // nothing was said
    if (again) { message.versions.pop(); message.at = before; } else asking.messages.splice(asking.messages.indexOf(message), 1);
  }
  failed = save(asking) || failed?.message;
  if (running === control) stop();
  if (turn.isConnected && chat.messages.includes(message)) {  // a message that is being edited stays
    turn.replaceWith(drawn(message, chat.messages.indexOf(message)));
    showSlots(chat.slots);
    drawList();
  } else if (chat === asking && !running) {
    draw();
  }
  if (failed) $("log").append(element("div", "error", failed));
}

function stop() {
  running?.abort();
  running = null;
  $("send").textContent = "Send";
  $("log").setAttribute("aria-busy", "false");
}

// what is typed and clicked

$("form").onsubmit = event => {
  event.preventDefault();
  if (running) return stop();
  const text = $("text").value.trim();
  if (!text) return;
  $("text").value = "";
  chat.messages.push(userMessage(text));
  const failed = save();
  if (failed) $("log").append(element("div", "error", failed));
  reply();
};
$("text").onkeydown = event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) $("form").requestSubmit();
};
document.onkeydown = event => { if (event.key === "Escape") { stop(); openList(false); } };
$("log").onclick = event => {
  const code = event.target.closest(".copy"), all = event.target.closest(".copy-all");
  if (code) copy(code.closest(".code").querySelector("code").textContent, code);
  if (all) copy(contentOf(chat.messages[[...$("log").children].indexOf(all.closest(".turn"))]), all);
};
$("new").onclick = () => show(chats.find(each => !each.messages.length) || begun());
$("menu").onclick = () => openList(!document.body.classList.contains("opened"));
$("veil").onclick = () => openList(false);
addEventListener("pagehide", () => { if (running) save(); });
addEventListener("storage", ({ key: changed }) => {  // another tab has said something
  const found = stored(), same = found.find(each => each.id === chat.id);
  const again = same && changed === PREFIX + chat.id && !running && !document.querySelector(".edited");
  if (again) chat = same;
  chats = [...(same ? [] : [chat]), ...found.map(each => (each === same ? chat : each))];
  again ? draw() : drawList();
});

fetch("/v1/models", { headers }).then(async answer => {
  if (!answer.ok) throw await refused(answer);
  model = (await answer.json()).data[0];
  document.title = document.querySelector("h1").textContent = model.id;
  showSlots(chat.slots || noSlots());
}).catch(error => { $("log").append(element("div", "error", error.message)); });
draw();
