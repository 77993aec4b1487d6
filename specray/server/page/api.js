// Calls to the API, with the user's key where the server requires one.

const KEY = "specray-api-key"; // in sessionStorage: for this tab, until it is closed

const $ = (id) => document.getElementById(id);

let askedForKey = null; // while the dialog is open
let hasDeclined = false; // the user closed the dialog, which then opens again only for `askAgain`

let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // storage is off: the key is kept in memory only
}
$("change-key").hidden = key === "";

/** Call the API. Asks for a key as long as the server wants another one and the user gives one. */
export async function call(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = { ...options.headers, ...(used && { Authorization: `Bearer ${used}` }) };
    const response = await fetch(new URL(`../${path}`, import.meta.url), { ...options, headers });
    if (response.ok) return response;
    const title = used ? "The server refused this key" : "This server needs an API key";
    if (response.status === 401 && (used !== key || (!hasDeclined && (await askForKey(title))))) continue;
    const error = await response.json().catch(() => null);
    throw new Error(error?.error?.message ?? `The server answered ${response.status}.`);
  }
}

/** Whether the user gave a key. Calls that wait for one share the dialog. */
export function askForKey(title) {
  const dialog = $("key-dialog");
  askedForKey ??= new Promise((resolve) => {
    $("change-key").hidden = false;
    $("key-title").textContent = title;
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(takeKey(dialog)), { once: true });
    dialog.showModal();
  }).finally(() => {
    askedForKey = null;
  });
  return askedForKey;
}

function takeKey(dialog) {
  const given = dialog.returnValue === "use" ? $("key").value.trim() : "";
  $("key").value = "";
  hasDeclined = given === "";
  if (hasDeclined) return false;
  key = given;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // storage is off
  }
  return true;
}

/** Let the next call ask for a key, even if the user declined to give one before. */
export function askAgain() {
  hasDeclined = false;
}
