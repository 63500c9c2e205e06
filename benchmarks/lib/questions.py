"""Questions, each with a sentence that answers it and shares few words with it."""

QUESTIONS = {
    "How do I reset my password?": "To change a forgotten password, open Settings and choose Account recovery.",
    "What is the capital of France?": "Paris is the largest city and the seat of government of France.",
    "How long should I boil an egg?": "Cook eggs in boiling water for seven minutes for a firm white and a soft yolk.",
    "Why is the sky blue?": "Air molecules scatter short wavelengths of sunlight more than long ones.",
    "Who wrote Hamlet?": "Shakespeare finished the tragedy about the Danish prince around 1600.",
    "How do plants make food?": "Through photosynthesis, leaves turn light, water and carbon dioxide into sugar.",
    "What causes earthquakes?": "Tectonic plates slip along faults and release stored energy as shaking.",
    "How can I save money on groceries?": (
        "Plan meals for the week, buy in bulk and compare unit prices in the supermarket."
    ),
    "What is a good exercise for back pain?": (
        "Gentle stretching and strengthening of the core muscles relieves the lower back."
    ),
    "When did the second world war end?": "Germany surrendered in May 1945 and Japan in September of that year.",
    "How do I fix a flat bicycle tyre?": "Take off the wheel, find the hole in the inner tube and glue a patch on it.",
    "What does a lawyer do?": "Attorneys advise clients about the law and represent them in court.",
    "How fast is light?": "In a vacuum it travels about 300,000 kilometres each second.",
    "What do cats eat?": "Felines are carnivores and live on meat such as mice and birds.",
    "How is wine made?": "Grapes are crushed and yeast ferments their juice into alcohol.",
    "What is inflation?": "A general rise of prices means that money buys less than before.",
    "How do vaccines work?": "They train the immune system to recognise a virus before it infects the body.",
    "Where do penguins live?": "These flightless birds are found on the coasts of Antarctica and the southern oceans.",
    "How do I learn to play the guitar?": "Practise a few chords every day and learn to strum simple songs.",
    "What is a computer virus?": "Malicious software copies itself and damages programs or steals data.",
}
