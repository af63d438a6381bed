// The conversations, each under a key of its own in the browser, so that tabs do not overwrite each other's. A chat has
// messages and what its cache held last; a reply has versions, of which `at` is shown and sent.
"use strict";

const PREFIX = "h2o-chat-", REQUEST_BYTES = 3 * 2 ** 20;
let chats = stored();
let chat = chats.find(each => each.id === sessionStorage.getItem("h2o-current")) || chats[0] || begun();

/** The chats in the browser, the one used last first. */
function stored() {
  const found = [];
  for (const key of Object.keys(localStorage).filter(name => name.startsWith(PREFIX) || name === "h2o")) {
    try {
      const kept = JSON.parse(localStorage.getItem(key));
      found.push(key === "h2o" ? imported(kept) : kept);  // "h2o": the one chat of earlier versions
      if (contentOf(found.at(-1).messages.at(-1)) === "") found.at(-1).messages.pop();  // left before its first token
    } catch (error) {
      console.warn(`${key} cannot be read: ${error}`);
    }
  }
  return found.filter(each => each.messages.length).sort((a, b) => b.changed - a.changed);
}

function imported({ messages, last }) {
  const roles = { user: userMessage, assistant: replyMessage };
  return { id: "first", changed: 0, messages: messages.map(({ role, content }) => roles[role](content)), slots: last };
}

function userMessage(content) {
  return { role: "user", content };
}

function replyMessage(content = "", thinking = "") {
  return { role: "assistant", versions: [{ content, thinking }], at: 0 };
}

/** The version of a reply that is shown. */
function version(message) {
  return message.versions[message.at];
}

function contentOf(message) {
  return message.role === "user" ? message.content : version(message).content;
}

/** The first messages of the chat as the server takes them: those after the last reply of which it has told an id, or
 * all that fit into a request. */
function sent(count, all = false) {
  const messages = chat.messages.slice(0, count);
  const last = all ? -1 : messages.findLastIndex(message => message.role === "assistant" && version(message).id);
  const taken = messages.slice(last + 1).map(message => ({ role: message.role, content: contentOf(message) }));
  for (let size = 0, first = taken.length - 1; first >= 0; first -= 1) {
    size += new Blob([JSON.stringify(taken[first])]).size;
    if (size > REQUEST_BYTES && first < taken.length - 1) { taken.splice(0, first + (taken[first].role === "user" ? 2 : 1)); break; }
  }
  return { messages: taken, ...(last >= 0 && { previous_response_id: version(messages[last]).id }) };
}

function titleOf({ messages }) {
  const words = (messages[0]?.content || "New chat").replace(/\s+/g, " ").trim();
  return words.length > 60 ? `${words.slice(0, 59)}…` : words;
}

/** A new chat with these messages. */
function begun(messages = []) {
  const made = { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, changed: Date.now(), messages, slots: null };
  chats.unshift(made);
  return made;
}

/** Keep a chat. Returns why that was not possible, or "". */
function save(kept = chat) {
  kept.changed = Date.now();
  try {
    localStorage.setItem(PREFIX + kept.id, JSON.stringify(kept));
    if (kept.id === "first") localStorage.removeItem("h2o");
    return "";
  } catch (error) {
    return `This browser cannot keep the conversation (${error.name}); delete others from the list.`;
  }
}

function remove(removed) {
  localStorage.removeItem(PREFIX + removed.id);
  if (removed.id === "first") localStorage.removeItem("h2o");
  chats = chats.filter(each => each !== removed);
  if (removed === chat) chat = chats[0] || begun();
}
