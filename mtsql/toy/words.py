"""The words of the toy benchmark: value pools and themes (what the databases are about).

A column is written `names|phrases|kind`. `names` are the possible column names and `phrases` the ways
people speak of it. Kinds: `int LOW HIGH`, `year`, `person`, `title`, `org`, and a pool of category values.
An entity is `singular plural (parent): columns`; the parent is the table its foreign key points to.
"""

from __future__ import annotations

from dataclasses import dataclass

PERSONS = (
    "Anna Bruno Carla David Elena Felix Greta Hugo Irene Jonas Karin Lukas Maria Nadia Oscar Paula "
    "Quentin Rosa Simon Tanja Ursula Victor Wanda Xavier Yvonne Zoltan Amir Beate Chloe Diego Esther "
    "Farah Gustav Helga Ivan Julia Kemal Laura Mirko Nora Olga Pedro Ruben Stefan Tomas Uma Vera Walter "
    "Yusuf Zara Adam Bella Cesar Dora Emil Flora Georg Hanna Igor Jana"
).split()
TITLE_FIRST = (
    "Blue Silent Golden Broken Hidden Lost Red Distant Gentle Frozen Burning Empty Secret Wild "
    "Little Last First Dark Bright Green Lonely Northern Southern Ancient"
).split()
TITLE_SECOND = (
    "River Garden Mountain Window Harbor Forest Letter Summer Winter Bridge Mirror Island Road "
    "Tower Valley Ocean Morning Night Storm Lantern"
).split()
ORG_FIRST = (
    "Apex Borealis Corvus Delta Everest Falcon Granite Horizon Indigo Juniper Keystone Lumen "
    "Meridian Nimbus Orion Pioneer Quartz Redwood Summit Titan Umbra Vertex Willow Zenith"
).split()

# Proper nouns are capitalised when people write them; common words are not.
PROPER = {
    "city": (
        "Berlin Paris London Madrid Rome Vienna Prague Lisbon Dublin Oslo Athens Warsaw Budapest "
        "Hamburg Munich Milan Turin Lyon Bilbao Porto Geneva Zurich Krakow Gdansk Seville Bergen "
        "Malmo Tampere Riga Vilnius Tallinn Sofia"
    ).split(),
    "country": (
        "France Spain Italy Germany Austria Poland Portugal Ireland Norway Sweden Finland Greece "
        "Hungary Denmark Belgium Estonia Latvia Iceland Turkey Canada Mexico Brazil Japan India"
    ).split(),
    "language": "English French German Spanish Polish Dutch Greek Danish Turkish Finnish".split(),
    "brand": "Volvo Fiat Skoda Renault Toyota Nissan Mazda Opel Seat Ford".split(),
}
COMMON = {
    "genre": "jazz rock folk pop blues opera techno soul".split(),
    "status": "active closed pending delayed".split(),
    "level": "basic medium expert".split(),
    "color": "red green blue white yellow".split(),
    "role": "defender keeper striker midfielder".split(),
    "cuisine": "vegan seafood grill bakery noodle".split(),
    "subject": "physics history biology law medicine".split(),
    "material": "wood steel glass plastic cotton".split(),
    "service": "express regular freight night".split(),
    "animal": "dog cat horse rabbit parrot".split(),
    "rank": "junior senior lead trainee".split(),
    "payment": "cash invoice transfer voucher".split(),
    "season": "spring autumn winter".split(),
    "size": "small large tiny".split(),
    "degree": "bachelor master doctor".split(),
    "topic": "travel science poetry crime fantasy".split(),
    "diet": "meat plants insects fruit".split(),
    "surface": "grass clay sand indoor".split(),
}

# Comparatives people use instead of "with a higher ...": (more, less, most, least).
ADJECTIVES = {
    "age": ("older than", "younger than", "oldest", "youngest"),
    "price": ("more expensive than", "cheaper than", "most expensive", "cheapest"),
    "weight": ("heavier than", "lighter than", "heaviest", "lightest"),
    "height": ("taller than", "shorter than", "tallest", "shortest"),
    "length": ("longer than", "shorter than", "longest", "shortest"),
}


@dataclass(frozen=True)
class ColumnWords:
    """A column before it is placed in a database: possible names, ways to say it, kind of value."""

    names: tuple[str, ...]
    phrases: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class EntityWords:
    """An entity before it is placed in a database; `parent` is the singular of another of its theme, or None."""

    singular: str
    plural: str
    parent: str | None
    columns: tuple[ColumnWords, ...]

    @property
    def person(self) -> bool:
        """Whether people say "who" of it."""
        return self.columns[0].kind == "person"


_AGE = "age|age|int 18 70"
_CITY = "city|city|city"
_COUNTRY = "country,nation|country|country"
_YEAR = "year|year|year"
_SALARY = "salary,wage|salary,pay|int 20 95"
_PRICE = "price,cost|price|int 5 90"
_FOUNDED = "founded,start_year|founding year|year"
_STATUS = "status,state|status|status"

_THEMES = {
    "music": f"""
        label labels: name|name|org; {_CITY}; {_FOUNDED}; revenue,income|revenue|int 10 99
        singer singers (label): name|name|person; {_COUNTRY}; {_AGE}; genre,style|genre|genre
        concert concerts (singer): title|title|title; {_CITY}; {_YEAR}; visitors,attendance|number of visitors|int 20 99; {_STATUS}
        song songs (singer): title|title|title; length,duration|length|int 2 40; language|language|language; {_YEAR}""",
    "sport": f"""
        club clubs: name|name|org; {_CITY}; {_FOUNDED}; members|number of members|int 20 99
        player players (club): name|name|person; {_COUNTRY}; {_AGE}; role,position|position|role; height|height|int 50 99
        game games (club): title|title|title; {_YEAR}; goals|number of goals|int 1 15; surface,ground|surface|surface
        coach coaches (club): name|name|person; {_SALARY}; {_COUNTRY}; level,grade|level|level""",
    "school": f"""
        school schools: name|name|org; {_CITY}; {_COUNTRY}; budget|budget|int 10 99
        teacher teachers (school): name|name|person; {_AGE}; subject,field|subject|subject; {_SALARY}; {_CITY}
        student students (school): name|name|person; {_AGE}; {_COUNTRY}; credits,points|number of credits|int 1 60; degree|degree|degree
        course courses (teacher): title|title|title; level,grade|level|level; hours|number of hours|int 2 40; {_STATUS}""",
    "company": f"""
        department departments: name|name|org; {_CITY}; budget|budget|int 10 99; floor|floor|int 1 12
        employee employees (department): name|name|person; {_AGE}; {_SALARY}; {_CITY}; rank,grade|rank|rank
        project projects (department): title|title|title; {_STATUS}; budget,cost|budget|int 10 99; {_YEAR}
        training trainings (employee): title|title|title; hours|number of hours|int 2 40; level|level|level; {_PRICE}""",
    "shop": f"""
        shop shops: name|name|org; {_CITY}; {_FOUNDED}; size,area|area|int 20 99
        product products (shop): name,title|name|title; {_PRICE}; color|color|color; material|material|material; weight|weight|int 1 50
        customer customers: name|name|person; {_CITY}; {_AGE}; {_COUNTRY}
        purchase purchases (customer): title,label|title|title; amount,total|amount|int 10 99; {_STATUS}; payment|payment|payment; {_YEAR}""",
    "library": f"""
        publisher publishers: name|name|org; {_CITY}; {_COUNTRY}; {_FOUNDED}
        author authors (publisher): name|name|person; {_COUNTRY}; {_AGE}; language|language|language
        book books (author): title|title|title; {_YEAR}; pages|number of pages|int 10 99; topic,theme|topic|topic; {_PRICE}
        review reviews (book): title|title|title; stars,score|score|int 1 10; {_YEAR}; language|language|language""",
    "transport": f"""
        station stations: name|name|title; {_CITY}; platforms|number of platforms|int 1 12; {_COUNTRY}
        train trains (station): name|name|title; service,kind|service|service; speed|speed|int 40 99; {_YEAR}; {_STATUS}
        driver drivers (station): name|name|person; {_AGE}; {_SALARY}; {_CITY}
        trip trips (driver): title|title|title; {_PRICE}; length,distance|length|int 5 90; season|season|season""",
    "zoo": f"""
        zoo zoos: name|name|org; {_CITY}; {_COUNTRY}; area,size|area|int 10 99
        animal animals (zoo): name|name|person; species,kind|species|animal; {_AGE}; weight|weight|int 1 90; diet,food|diet|diet
        keeper keepers (zoo): name|name|person; {_AGE}; {_SALARY}; rank|rank|rank
        visit visits (animal): title|title|title; {_YEAR}; {_STATUS}; cost,fee|cost|int 5 90""",
    "cinema": f"""
        studio studios: name|name|org; {_COUNTRY}; {_FOUNDED}; revenue|revenue|int 10 99
        film films (studio): title|title|title; {_YEAR}; length,minutes|length|int 60 99; topic,theme|topic|topic; language|language|language
        actor actors (film): name|name|person; {_AGE}; {_COUNTRY}; {_SALARY}
        cinema cinemas (film): name|name|org; {_CITY}; seats,capacity|number of seats|int 20 99; {_PRICE}""",
    "food": f"""
        restaurant restaurants: name|name|org; {_CITY}; cuisine,kitchen|cuisine|cuisine; seats|number of seats|int 10 99; stars|number of stars|int 1 9
        cook cooks (restaurant): name|name|person; {_AGE}; {_SALARY}; {_COUNTRY}; rank,grade|rank|rank
        dish dishes (restaurant): name,title|name|title; {_PRICE}; size,portion|size|size; season|season|season
        guest guests (restaurant): name|name|person; {_CITY}; {_AGE}; payment|payment|payment""",
    "cars": f"""
        maker makers: name|name|org; {_COUNTRY}; {_FOUNDED}; workers|number of workers|int 10 99
        dealer dealers (maker): name|name|org; {_CITY}; rating|rating|int 1 10; {_STATUS}
        car cars (dealer): name,model|name|title; brand,make|brand|brand; {_PRICE}; color|color|color; weight|weight|int 20 99; {_YEAR}
        owner owners (car): name|name|person; {_AGE}; {_CITY}; income|income|int 20 99""",
    "health": f"""
        clinic clinics: name|name|org; {_CITY}; beds|number of beds|int 10 99; {_FOUNDED}
        doctor doctors (clinic): name|name|person; field,subject|field|subject; {_AGE}; {_SALARY}; {_COUNTRY}
        patient patients (doctor): name|name|person; {_AGE}; {_CITY}; weight|weight|int 40 99; height|height|int 50 99
        treatment treatments (patient): title|title|title; {_PRICE}; {_STATUS}; {_YEAR}; level|level|level""",
    "events": f"""
        venue venues: name|name|org; {_CITY}; capacity,seats|capacity|int 20 99; {_COUNTRY}
        festival festivals (venue): title,name|title|title; genre,style|genre|genre; {_YEAR}; season|season|season; {_PRICE}
        sponsor sponsors (festival): name|name|org; {_COUNTRY}; amount,budget|amount|int 10 99; level,rank|level|level
        helper helpers (festival): name|name|person; {_AGE}; {_CITY}; hours|number of hours|int 2 40""",
    "trade": f"""
        warehouse warehouses: name|name|org; {_CITY}; {_COUNTRY}; capacity|capacity|int 20 99
        supplier suppliers (warehouse): name|name|org; {_COUNTRY}; {_STATUS}; rating,score|rating|int 1 10
        item items (supplier): name,title|name|title; material|material|material; {_PRICE}; weight|weight|int 1 50; size|size|size
        delivery deliveries (item): title|title|title; service,kind|service|service; {_YEAR}; amount|amount|int 10 99; {_CITY}""",
}


def _column(text: str) -> ColumnWords:
    names, phrases, kind = text.strip().split("|")
    return ColumnWords(tuple(names.split(",")), tuple(phrases.split(",")), kind)


def _entity(line: str) -> EntityWords:
    head, columns = line.split(":", 1)
    singular, plural, *parent = head.split()
    return EntityWords(
        singular,
        plural,
        parent[0].strip("()") if parent else None,
        tuple(map(_column, columns.split(";"))),
    )


def themes() -> dict[str, tuple[EntityWords, ...]]:
    """All themes: name -> its entities, parents before children."""
    return {
        name: tuple(_entity(line) for line in text.strip().splitlines()) for name, text in _THEMES.items()
    }
