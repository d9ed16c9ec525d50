const request = document.getElementById("request");
const answer = document.getElementById("answer");

fetch("examples.json").then((r) => r.json()).then((examples) => {
  request.value = JSON.stringify(examples[0].request, null, 2);
});

document.getElementById("send").addEventListener("click", async () => {
  const response = await fetch("api/jev", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: request.value,
  });
  answer.textContent = JSON.stringify(await response.json(), null, 2);
});
